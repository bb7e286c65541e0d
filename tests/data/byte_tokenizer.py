"""A tokenizer with a token per byte, and a chat with its template."""

from __future__ import annotations


def make_tokenizer(template=None, eos: str | None = "~"):
    """A token per byte, a begin token before plain text, as many real tokenizers have it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", *letters])}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=built, pad_token="<pad>", bos_token="<s>", eos_token=eos)
    fast.chat_template = template
    return fast


TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


CHAT = [{"role": "user", "content": "hi"}]
