# Copyright 2026 the megatron-mtraining authors. Licensed under the Apache License, Version 2.0.
"""Bytes that mean something in a format, to be put into inputs."""

from __future__ import annotations

import pickle

# Of pickles: what a stranger would put there. None of it may be called.
GADGETS = (
    b"cos\nsystem\n(S'true'\ntR",
    b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R",
    b"cbuiltins\nexec\n(S'import os; os.system(\"true\")'\ntR",
    b"cbuiltins\ngetattr\n",
    b"ctorch.storage\n_load_from_bytes\n(B\x04\x00\x00\x00abcdtR",
    b"ctorch\nload\n(S'/etc/passwd'\ntR",
    b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}V__repr__\nI1\nstb",
    b"cpathlib\nPosixPath\n(S'..'\ntR",
    b"r\xff\xff\xff\x07", b"j\xff\xff\xff\x7f", b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"B\xff\xff\xff\x7f", b"\x8b\x10\x00\x00\x00" + b"\xff" * 16,
    *(bytes([letter]) for letter in b"(}]N0.2asb"),
    pickle.dumps(10**30)[2:-1], b"G\x7f\xf0\x00\x00\x00\x00\x00\x00",
)  # fmt: skip
JSON_TOKENS = (
    *(bytes([letter]) for letter in b'{}[]":,'), b"null", b"true", b"0", b"0.5", b"1e999", b"-1", b"NaN",
    b"9" * 5000, b"\\ud800", b"\\u0000", b"[" * 3000, b'{"a":' * 3000, b"\xff", b"\xef\xbb\xbf",
)  # fmt: skip
YAML_TOKENS = (
    *JSON_TOKENS[:15],
    b"&a ",
    b"*a",
    b"<<: ",
    b"=: ",
    b"---\n",
    b"? ",
    b"- ",
    b"\t",
    b"|\n",
    b"~",
    b"%YAML 9.9\n",
    b"!!python/object/apply:os.system ['true']",
    b"2001-99-99",
    b"1:30",
    b"010",
    b"0x",
    b"0b_",
    b".inf",
    b".nan",
    *(
        b"!!" + kind + b" "
        for kind in b"binary set omap timestamp int float null bool str seq map".split()
    ),
)
LINES = (
    b"\n",
    b"\r",
    b"\n\n",
    b"\0",
    b'{"text": null}\n',
    b'{"text": ""}\n',
    b"{}\n",
    b"[]\n",
    *JSON_TOKENS,
)
