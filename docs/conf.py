"""How Sphinx reads these pages; `make docs` builds them into build/docs."""

import re
from pathlib import Path

DOCS = Path(__file__).parent

project = "sglang-droidspeak"
author = "the sglang-droidspeak authors"
extensions = ["myst_parser"]
smartquotes_action = "q"  # Two dashes are the beginning of a flag.
html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["llms.txt"]
myst_heading_anchors = 3


def setup(app):
    app.connect("source-read", link_outside_pages_as_files)


def link_outside_pages_as_files(app, page, source):
    """Markdown outside of this folder is no page of the site: MyST links it as a file to load."""
    folder = (DOCS / page).parent

    def link(found):
        outside = not (folder / found[1]).resolve().is_relative_to(DOCS)
        return f"](<path:{found[1]}>)" if outside else found[0]

    source[0] = re.sub(r"\]\((\.\./[^)#]*\.md)[^)]*\)", link, source[0])
