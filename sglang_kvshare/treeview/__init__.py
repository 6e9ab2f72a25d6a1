"""A picture of the cache for a person: what is in the tree, and what reuses what."""

from __future__ import annotations

from sglang_kvshare.treeview.model import PictureError, TreePicture

#: What a picture can be written as.
FORMATS = ("text", "json", "svg", "html")


def render(picture: TreePicture, form: str) -> tuple[str, str]:
    """``(media type, content)`` of a picture in one of :data:`FORMATS`."""
    from sglang_kvshare.treeview import html, svg, text

    if form == "json":
        return "application/json", picture.to_json()
    if form == "svg":
        return "image/svg+xml", svg.draw(picture)
    if form == "html":
        return "text/html; charset=utf-8", html.page(picture)
    return "text/plain; charset=utf-8", text.lines(picture)


__all__ = ["FORMATS", "PictureError", "TreePicture", "render"]
