# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Data, installed as ``megatron_mtraining.patches``: what ``mtraining patch`` applies to a checkout.

This file is here so that the folder is a package however it is installed.
"""
