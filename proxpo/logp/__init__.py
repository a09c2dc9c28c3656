"""Log-probabilities of tokens from hidden states, without ever holding tokens × vocabulary."""

from proxpo.logp._features import score_features
from proxpo.logp._model import bare_model, model_logp
from proxpo.logp._token import LogpEntropy, token_logp

__all__ = ["LogpEntropy", "bare_model", "model_logp", "score_features", "token_logp"]
