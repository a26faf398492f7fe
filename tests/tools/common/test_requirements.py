# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Optional packages that are missing are named with a command that installs them."""

from importlib.metadata import PackageNotFoundError

import pytest

from megatron_mtraining import ConfigError, requirements
from megatron_mtraining.requirements import first_line, install_command, require

METADATA = [
    "torch>=2.6",
    "tqdm; extra == 'data'",
    "transformers>=4.45; extra == 'data'",
    "transformers>=5.10 ; extra == 'inspect'",
    "backports.zstd; python_version < '3.14' and extra == 'data'",
]


def test_require_names_packages_and_what_installs_them(monkeypatch):
    monkeypatch.setattr(requirements, "requires", lambda name: METADATA)
    require("json", "os.path", extra="data")
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        require("tqdm", "transformers", "yaml.no", "backports.zstd", extra="data")
    assert str(error.value) == (
        "tqdm, transformers, pyyaml, backports.zstd not installed: "
        "pip install tqdm 'transformers>=4.45' pyyaml backports.zstd"
    )
    assert install_command(["transformers"], "inspect") == "pip install 'transformers>=5.10'"
    assert install_command(["torch"], "inspect") == "pip install 'torch>=2.6'"


def test_a_checkout_that_is_not_installed_names_packages_without_versions(monkeypatch):
    def nothing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(requirements, "requires", nothing)
    assert install_command(["torch", "tqdm"], "data") == "pip install torch tqdm"


def test_first_line():
    assert first_line(ValueError("\none\ntwo")) == "ValueError: one"
    assert first_line(ValueError()) == "ValueError"
