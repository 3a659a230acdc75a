"""Files of requests, as `rayllm batch` answers them: lines, inputs, results that survive a kill, and the runner."""
