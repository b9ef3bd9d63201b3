"""Every drafter on the shipped target: free text, and text that is copied.

Free: held-out functions, cut in the middle. Copied: a held-out function, to be repeated with a renamed argument. Temperature 0,
the default draft length.
"""

from shared import Race, Section

from assisted import Merged

DRAFTS = {
    '"suffix"': "suffix",
    '"ngram"': "ngram",
    '"recycle"': "recycle",
    '"early-exit"': "early-exit",
    '"layer-skip"': "layer-skip",
    '"self:int8"': "self:int8",
    '"self:int8-bitsandbytes"': "self:int8-bitsandbytes",
    '"zoo:draft"': "zoo:draft",
    '"zoo:draft-other-tokenizer"': "zoo:draft-other-tokenizer",
    '"zoo:medusa"': "zoo:medusa",
    '"zoo:eagle3"': "zoo:eagle3",
    '["suffix", "zoo:draft"]': ["suffix", "zoo:draft"],
    'Merged(["zoo:draft", "suffix"])': Merged(("zoo:draft", "suffix")),
}
QUICK = {"drafts": ['"suffix"', '"zoo:draft"']}
SECTIONS = (Section("methods/index"),)


def races(args):
    drafts = {name: (spec, None) for name, spec in DRAFTS.items()}
    return {title: Race(drafts, kind=kind) for title, kind in (("Free text", "code"), ("Copied text", "edits"))}


def _cost(row):
    """Of the time of a forward pass and its draft, in plain tokens, the share spent drafting; by drafted tokens."""
    if not row.draft or not row.drafted_per_pass or row.speedup is None:
        return ""
    return f"{row.draft * row.tokens_per_pass / row.speedup.ratio / row.drafted_per_pass:.3f}"


TABLE = {
    "columns": ("speedup", "tokens per pass", "accepted", "draft cost", "same tokens", "repeated 4-grams"),
    "note": "Draft cost: of one drafted token, in plain tokens.",
    "named": "`draft=`",
    "draft cost": _cost,
}
