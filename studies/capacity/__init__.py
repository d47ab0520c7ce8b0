"""`python -m studies.capacity`: the largest GPT that trains in a process whose memory is limited.

| module | what it does |
|---|---|
| `gpt` | the model, with almost no activations |
| `search` | trains one size in a process with a limit, searches for the largest that fits |
"""
