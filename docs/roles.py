"""Makes links of the roles that docstrings use: :func:`fastcross.swap`, :class:`EmbeddingStack`."""

import re
from typing import Any

ROLE = re.compile(r":(?:func|class|meth|data|mod|attr):<code>(.*?)</code>")
CURRENT = re.compile(r'<h[2-4] id="(fastcross[\w.]*)"|' + ROLE.pattern)


def on_page_content(html: str, **_: Any) -> str:
    """A name without a dot is one of the object's own module; a name that no page has stays as code."""
    above = ""

    def link(match: re.Match[str]) -> str:
        nonlocal above
        if match[1]:
            above = match[1]
            return match[0]
        name = match[2]
        home = above.rpartition(".")[0]
        full = name if name.startswith(("fastcross.", "torch.")) else f"{home}.{name}"
        return f'<autoref optional identifier="{full}"><code>{name}</code></autoref>'

    return CURRENT.sub(link, html)
