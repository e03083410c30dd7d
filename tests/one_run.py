"""A run of a script that is a function in the process of the tests."""

from gradguard.parity.saved import write


class InThisProcess:
    """One of several runs of a script, which ends in place, without a fork."""

    def __init__(self, file, how):
        self.file, self.how, self.refusal, self.done = file, how, "", False

    def which(self):
        return self.how

    def end(self, saved, refusal=""):
        self.refusal, self.done = refusal, saved is not None
        if saved is not None:
            write(self.file, saved)
        raise SystemExit
