# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Memory that tensors take on the CPU, where PyTorch keeps no count of it."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """The most bytes of storages made under it that live at once."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.known = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = {key for key, _ in _storages((args, kwargs))}
        result = function(*args, **kwargs)
        for key, storage in _storages(result):
            if key not in given and key not in self.known:
                self.known.add(key)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._freed, key, storage.nbytes())
        return result

    def _freed(self, key, size):
        self.known.discard(key)
        self.now -= size


def _storages(tree):
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            storage = leaf.untyped_storage()
            yield storage._cdata, storage
