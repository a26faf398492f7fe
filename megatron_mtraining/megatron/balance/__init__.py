# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Balance of data-parallel ranks in a run of Megatron-LM; :mod:`megatron_mtraining.balance` decides.

- :mod:`.run`: what a run has of it, the one object that the rest of the plug-in calls.
- :mod:`.options`: what it needs of the arguments, and what it refuses.
- :mod:`.batching`: the data loader that follows plans; :mod:`.sample_documents`: lengths of documents.
- :mod:`.observer`: what core attention calls: it times calls, moves their price and keeps what they find.
- :mod:`.balancer`: multipliers of the price by micro-batch, and accounting; :mod:`.table`: what ranks sum;
  :mod:`.log`: the line in the log.
"""
