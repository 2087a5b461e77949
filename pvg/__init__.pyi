from pvg.api import Run as Run
from pvg.api import evaluate as evaluate
from pvg.api import load_experiment as load_experiment
from pvg.api import play as play
from pvg.verifier.scorer import VerifierScorer as VerifierScorer

__version__: str
API: dict[str, str]
