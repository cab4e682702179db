"""What the reading path runs: demos, puzzles, pages, GPU lessons, pictures. bench/ is what bench.py measures with.

`python -m lessons --help` lists the demos.
"""
