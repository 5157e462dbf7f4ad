"""Small checkpoints with tokenizers, for the commands that read them."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from longspan import hf
from longspan.models import BertConfig, CausalLM, Encoder, LlamaConfig, LongformerConfig, MistralConfig
from tests.made import made

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{n}" for n in range(27))]


def words() -> Tokenizer:
    """A tokenizer of the words w0 to w26, between [CLS] and [SEP]."""
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def byte_level() -> Tokenizer:
    """A tokenizer of single bytes: most characters of most scripts are several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def save(model, directory, tokenizer):
    hf.save(model, directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


SMALL = dict(hidden_size=6, num_attention_heads=2, num_hidden_layers=2, intermediate_size=7)


def bert(directory):
    config = BertConfig(vocab_size=len(WORDS), max_position_embeddings=90, **SMALL)
    return save(made(Encoder, config), directory, words())


def longformer(directory):
    config = LongformerConfig(vocab_size=len(WORDS), max_position_embeddings=92, window=(3, 5), **SMALL)
    return save(made(Encoder, config), directory, words())


def llama(directory):
    config = LlamaConfig(vocab_size=256, max_position_embeddings=100, **(SMALL | dict(hidden_size=8)))
    return save(made(CausalLM, config), directory, byte_level())


def mistral(directory):
    config = MistralConfig(vocab_size=256, sliding_window=16, num_key_value_heads=1, **(SMALL | dict(hidden_size=8)))
    return save(made(CausalLM, config), directory, byte_level())
