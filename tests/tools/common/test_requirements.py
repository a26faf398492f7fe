# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Optional packages that are missing are named with the extra that brings them."""

import pytest

from megatron_mtraining import ConfigError
from megatron_mtraining.requirements import first_line, require


def test_require_names_packages_and_extra():
    require("json", "os.path", extra="data")
    with pytest.raises(ConfigError) as error:
        require("json", "no_such_module", "yaml.no", "no.such.submodule", extra="data")
    assert str(error.value) == (
        "no_such_module, pyyaml, no.such.submodule not installed: pip install 'megatron-mtraining[data]'"
    )


def test_first_line():
    assert first_line(ValueError("\none\ntwo")) == "ValueError: one"
    assert first_line(ValueError()) == "ValueError"
