"""Models of a finished run for other programs: Hugging Face directories, scores of a file, and a reward server.

Importing this package loads no torch.
"""
