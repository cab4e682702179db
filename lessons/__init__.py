"""What the reading path runs: demos, GPU lessons, claims, pictures, peers, measuring.

`python -m lessons --help` lists the demos.
"""
