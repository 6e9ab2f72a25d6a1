"""Source patches to SGLang, installed as ``kvshare_patches``; `kvshare patch` finds them here.

One folder a version, in it one diff a concern and the checksums of all files they can bring about.
"""
