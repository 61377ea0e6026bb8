"""Most of a start is imports. The processes of a server leave these libraries out until `READY`.

Each process is imported in a process of its own, as a start does. If one of these tests fails, something new imports
such a library, or a library has changed in a way that `single_files` or `meta_tensors` no longer fits.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

SERVER = """
import inferd.server.commands.app
import inferd.engine.api.process.engine_process
import inferd.server.text.render_workers
import inferd.server.lifecycle.serve
"""
RENDERS = """
from inferd.server.tools.single_files import skip_code_of
skip_code_of("transformers", "transformers.utils")
import inferd.server.text.rendering
"""
ENGINE = """
from inferd.engine.models import meta_tensors
meta_tensors.leave_out()
import inferd.engine.process.main
"""

NOT_IMPORTED = {
    "server": (SERVER, ("torch", "transformers", "transformers.utils", "huggingface_hub.hf_api", "httpx2")),
    "renders": (RENDERS, ("torch", "fastapi", "pydantic", "httpx", "tokenizers", "transformers.utils.hub")),
    "engine": (ENGINE, ("torch._refs", "torch._decomp", "torch._prims", "sympy", "torch._dynamo", "transformers")),
}


def run(program: str) -> set[str]:
    """The words that a program prints."""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("process", NOT_IMPORTED)
def test_a_process_imports_little_before_it_is_ready(process: str) -> None:
    program, left_out = NOT_IMPORTED[process]
    assert not run(f"{program}\nimport sys\nprint(*sys.modules)") & set(left_out)


def test_files_of_transformers_stay_those_of_the_library() -> None:
    """The server's files of transformers and those of the whole library, which a folder's tokenizer needs, are the
    same."""
    program = """
from inferd.server.tools import response_templates as ours
from transformers.tokenization_utils_tokenizers import TokenizersBackend
from transformers.utils.chat_parsing import response_parser, response_templates
print(ours.ResponseTemplate is response_templates.ResponseTemplate)
print(ours.process_field is response_parser.process_field)
"""
    assert run(program) == {"True"}


def test_meta_tensors_can_be_brought_in() -> None:
    """Without the part an operation on them fails. With it they have the shape that the library states."""
    program = """
from inferd.engine.models import meta_tensors
meta_tensors.leave_out()
import torch
def shape():
    square = torch.empty(3, 3, device="meta")
    try:
        return torch.linalg.eig(square)[0].shape == (3,)
    except NotImplementedError:
        return "refused"
print("before", shape())
meta_tensors.bring_in()
print("after", shape())
import torch._meta_registrations as part
print(part.__file__ is not None)
"""
    assert run(program) == {"before", "refused", "after", "True"}
