"""Source patches to SGLang: what they are, and putting them in and taking them out again.

Nothing requires them; see docs/patches.md. A patch is a unified diff, and every state of every file
that patches can bring about is known by its checksum, so that nothing unknown is ever changed.
"""
