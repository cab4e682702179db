"""The proofs, by subject. test_all.py is their table of contents."""
