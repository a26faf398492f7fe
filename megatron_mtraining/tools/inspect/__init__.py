# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""What a sparse pattern would keep of a trained model's attention: ``mtraining inspect``.

``command`` is the order of events, ``options`` what a user can set, ``sources`` opens a model
(``hugging_face``, ``megatron_checkpoint``), ``text`` its tokens, ``sweep`` the settings that are tried,
``measure`` recall and density of a layer, ``results`` what follows from all layers, ``output`` the files.
"""
