"""The largest GPT that trains in a fixed amount of memory, for each optimizer; and one step of a model of billions.

python -m studies.capacity --limit 4GiB 8GiB     # hours; goes on where it was stopped
python -m studies.capacity --billions 5
python -m studies.capacity --render              # the table, and docs/capacity.png, from studies/results/capacity.json

`search` looks for the largest width, `limited` trains one model in a process that may allocate so much, `gpt` is the
model, and `page` writes the tables and the picture.
"""
