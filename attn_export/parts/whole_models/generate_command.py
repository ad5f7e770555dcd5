"""`attn-export generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attn_export.commands.options import option, with_help
from attn_export.commands.output import echo

_COUNT = 64


@with_help(
    "Build and ship",
    'generate models/tiny-llama --prompt "Once upon a time"',
    'generate models/tiny-chat --chat --prompt "Who are you?" --stop "User:"',
)
@option("bundle", type=Path)
@option("--prompt", metavar="TEXT", help="The text to continue; needs the bundle's tokenizer.")
@option("--ids", metavar="1,2,3", help="The token ids to continue; ids are printed.")
@option(
    "--prompts", "file", type=Path, metavar="FILE",
    help="Several prompts: texts in FILE.txt, one on each line, or texts, lists of ids or lists of "
    "messages in FILE.json or FILE.jsonl. A line of JSON is printed for each.",
)  # fmt: skip
@option(
    "--chat", "is_chat", is_flag=True,
    help="Apply the bundle's chat template to each text, as a message of the user, or to messages.",
)  # fmt: skip
@option(
    "--sound", type=Path, metavar="FILE",
    help="Speech for a model that hears it: FILE.wav, or its features in FILE.npy.",
)  # fmt: skip
@option(
    "--stop", "stops", multiple=True, metavar="TEXT",
    help="End before this text. May be given several times.",
)  # fmt: skip
@option(
    "--count", type=int, least=1, default=_COUNT, show_default=True, metavar="N",
    help="The most tokens to generate.",
)  # fmt: skip
@option(
    "--temperature", type=float, least=0, metavar="T",
    help="Divides the logits before a token is drawn; 0 takes the largest.  [default: that of "
    "generation_config.json, or 0]",
)  # fmt: skip
@option("--top-k", type=int, least=1, metavar="K", help="Draw from the K likeliest tokens.")
@option(
    "--top-p", type=float, metavar="P",
    help="Draw from the likeliest tokens that have P together.",
)  # fmt: skip
@option(
    "--repetition-penalty",
    type=float,
    metavar="R",
    help="Makes tokens that were there before less likely, above 1.",
)
@option("--seed", type=int, least=0, default=0, show_default=True, metavar="N", help="Of draws.")
@option(
    "--threads", type=int, least=1, most=1024, metavar="N",
    help="Threads, at most one per core.  [default: all cores]",
)  # fmt: skip
@option("--dialect", metavar="NAME", help="The graphs to run.  [default: the fastest]")
def generate_command(bundle: Path, **options: Any) -> int:
    """Continue prompts with a whole model that `build --model` wrote, without torch.

    Tokens are printed as they come, until the model ends the text. Without --chat, no chat template
    is applied. An encoder-decoder reads the prompt, or hears the sound, and then writes.
    """
    from attn_export.parts.whole_models.generating import print_generated

    print_generated(bundle, echo, **options)
    return 0
