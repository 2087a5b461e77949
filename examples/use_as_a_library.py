"""pvg as a library: play a small game, look at the run, and score texts with the verifier that it trained.

    python examples/use_as_a_library.py            # about 40 seconds on 2 cores

Each `# %%` begins a cell. VS Code, PyCharm and Spyder run the cells one by one; so does Jupyter with jupytext.
"""

# %% Play a small game. Settings are the keys of the experiment file. Without settings, pvg plays the whole game.
import pvg

SMALL = {"game.rounds": 1, "game.mint_problems": 256, "verifier.steps": 40, "training.steps": 20}

run = pvg.play("modchain", SMALL)
print(f"{run.path} is {run.status}.")

# %% The result of each round comes from fresh samples on test problems.
for number, result in enumerate(run.rounds):
    for metric in ("helpful_accuracy", "sneaky_error_rate", "fooled_rate", "verifier_auc"):
        print(f"round {number}  {metric:<18} {result[metric]:.2f}")

# %% Each optimizer step has a record. `examples` returns solutions of the newest prover.
steps = [record["metrics"] for record in run.metrics if record["kind"] == "step" and record["phase"] == "train_prover"]
print(f"Mean reward of the first step {steps[0]['reward_mean']:.2f}, of the last {steps[-1]['reward_mean']:.2f}.")
for example in run.examples(each=1):
    print(f"{example.why}: {example.question} {example.text} (score {example.score:.2f})")

# %% Score texts with the verifier of the last round. It accepts scores at or above its threshold.
PROBLEM = "7+5+8+3+6?"
SOLUTIONS = {"correct": "7+5=2;2+8=0;0+3=3;3+6=9;A9", "wrong sum": "7+5=2;2+8=0;0+3=4;4+6=0;A0", "no solution": "A9"}

with pvg.VerifierScorer.load(run) as scorer:
    scores = scorer.score_texts(PROBLEM, list(SOLUTIONS.values()))
    print(f"The verifier accepts scores from {scorer.threshold:.2f} on.")
for (name, text), score in zip(SOLUTIONS.items(), scores, strict=True):
    print(f"{score:7.2f}  {name:<12} {text}  {'accepted' if score >= scorer.threshold else 'refused'}")
if max(scores) > scores[0]:
    print("A wrong text has the highest score: this verifier had one short round. Without SMALL, a game has five.")

# %% The settings, and the paths of the weights.
print(run.experiment.task)
print(*run.weights.values(), sep="\n")
