# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Train a small Megatron-Core model on this machine, dense and sparse, and compare the two.

``main`` is the order of events, ``options`` what a user can set, ``text`` the training text,
``model`` the GPTModel and its loss, ``train`` what each process does, ``cpu`` what Megatron needs
where there is no GPU.
"""
