"""Response templates as transformers reads them: three of its files, without the rest of the library."""

from __future__ import annotations

from inferd.server.tools.single_files import single_files

try:
    with single_files("transformers", "transformers.utils", "transformers.utils.chat_parsing"):
        from transformers.utils.chat_parsing.content_parsers import process_field
        from transformers.utils.chat_parsing.response_templates import (
            ResponseTemplate,
            ResponseTemplateField,
            load_response_template,
        )
except ImportError:  # another version's files need their packages: the same, but a slower start
    from transformers.utils.chat_parsing.content_parsers import process_field
    from transformers.utils.chat_parsing.response_templates import (
        ResponseTemplate,
        ResponseTemplateField,
        load_response_template,
    )

__all__ = ["ResponseTemplate", "ResponseTemplateField", "load_response_template", "process_field"]
