"""These tests exist only where a GPU is; those of several only where there are two."""

import torch

collect_ignore_glob = []
if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
elif torch.cuda.device_count() < 2:
    collect_ignore_glob = ["test_two_gpus.py"]
