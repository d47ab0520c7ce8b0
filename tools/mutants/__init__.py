"""What is wrong in each mutation: what, the file, its text and the text in its place."""
