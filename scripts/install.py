"""Installs packages into an environment: with uv, looking where pip is configured to look, or with
pip where there is no uv or uv fails.

    .venv/bin/python scripts/install.py .venv-verl -r requirements/verl.txt

uv takes a fifth of pip's time and shares the files of one version among environments.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

UV = Path(sys.executable).with_name("uv")
# pip's option -> uv's variable and what separates several values in it
VARIABLES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "cert": ("SSL_CERT_FILE", " "),
}


def main() -> int:
    environment, *packages = sys.argv[1:]
    uv = [str(UV), "pip", "install", "-q", "--python", environment, *packages]
    if UV.exists() and subprocess.run(uv, env={**uv_variables(), **os.environ}).returncode == 0:
        return 0
    print(f"{environment}: installing with pip, without uv", file=sys.stderr)
    pip = [sys.executable, "-m", "pip", "--python", environment, "install", "-q", *packages]
    return subprocess.run(pip).returncode


def uv_variables() -> dict[str, str]:
    """pip's configuration, as uv reads it; like pip, the best version of all indexes is taken."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    places = ("global", "install", ":env:")  # a later one overrides
    options: dict[str, str] = {}
    for place in places:
        for line in lines:
            name, _, value = line.partition("=")
            if name.startswith(f"{place}."):
                options[name.removeprefix(f"{place}.")] = ast.literal_eval(value)
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for option, (variable, separator) in VARIABLES.items():
        if option in options:
            variables[variable] = separator.join(options[option].split())
    return variables


if __name__ == "__main__":
    sys.exit(main())
