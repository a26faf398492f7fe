# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What sparse patterns would keep of a trained model's attention: ``mtraining inspect``.

``command`` runs everything, ``options`` is what a user can set, ``sweep`` the settings that are tried,
``measure`` recall and density of a layer, ``collect`` gathers them over layers. ``results`` recommends
settings, ``settled`` measures these, ``sensitivity`` sets a target for each layer or head; ``output`` writes
files and pictures.
"""
