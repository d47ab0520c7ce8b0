"""What a maintainer runs now and then: the matrix of versions, and a release."""
