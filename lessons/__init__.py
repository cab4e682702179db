"""What the reading path runs: demos, puzzles, pages, GPU lessons, pictures, peers, measuring.

`python -m lessons --help` lists the demos.
"""
