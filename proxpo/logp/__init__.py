"""Log-probabilities of tokens from hidden states, without ever holding tokens × vocabulary."""

from proxpo.logp._features import score_features
from proxpo.logp._kl import HeadInput, KlEntropy, token_kl
from proxpo.logp._model import bare_model, model_logp, model_states
from proxpo.logp._thoughts import thoughts_fed
from proxpo.logp._token import LogpEntropy, token_logp

__all__ = [
    "HeadInput",
    "KlEntropy",
    "LogpEntropy",
    "bare_model",
    "model_logp",
    "model_states",
    "score_features",
    "thoughts_fed",
    "token_kl",
    "token_logp",
]
