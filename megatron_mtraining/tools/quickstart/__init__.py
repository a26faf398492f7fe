# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Train a small Megatron-Core model on this machine, dense and sparse, and compare the two.

``command`` runs everything, ``options`` is what a user can set, ``text`` the training text, ``model`` the
GPTModel and its loss, ``ranks`` the processes, ``train`` what each does, ``results`` table and pictures.
"""
