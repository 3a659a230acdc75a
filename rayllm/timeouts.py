"""Who watches whom, how often, and what follows when one stays silent: every interval and deadline of the engine.

| border | who watches | sign of life | silent after | what follows |
|---|---|---|---|---|
| front - engine | both | IDLE_BEAT_S; a connection that ends | SILENCE_S | the engine aborts; requests go elsewhere |
| front - engine's process and host | the front | CONNECTION_PING_S | CONNECTION_SILENCE_S | requests go on elsewhere |
| engine - request with an idempotency key | the engine | a front that wants its tokens | KEEP_S | it is forgotten |
| API server - response in the background | who asks for it | RESPONSE_BEAT_S | RESPONSE_SILENCE_S | it is taken over |
| API server - batch | the other API servers | BATCH_BEAT_S | BATCH_SILENCE_S | one of them goes on with it |
| driver - rank | the driver | PING_S; a dead process is seen at once | RANK_SILENCE_S | new ranks take over |
| driver - starting rank | the driver | the same | RANK_START_SILENCE_S, RANK_START_S a phase | the start fails |
| driver - standby that takes over | the driver | the same | STANDBY_ANSWER_S, RANK_RESUME_SILENCE_S | new ranks start |
| driver - standby | the driver | as a rank's | RANK_SILENCE_S | new standbys start |
| driver - step | the driver | the step's result | STEP_S | new ranks take over |
| Serve - replica | Ray Serve | HEALTH_PERIOD_S | HEALTH_TIMEOUT_S | Ray Serve replaces the replica |
| its process - replica | a process beside it | it is not stopped by a signal | STOPPED_S | the replica is killed |
| replica, front - directory | the directory | REGISTER_S | MEMBER_SILENCE_S | the entry goes; others stop using it |
| host - its cloud | each replica on it | SPOT_POLL_S | - | Ray drains it; its replicas end LEAVE_S before it goes |
| new replica - API servers | the replica | their first beats | JOIN_S | it counts as started without them |
| launch - application | `rayllm launch` | STATUS_S | - | it says what Ray Serve says |
| ingress | its host's launch or actor | an answer every INGRESS_ASK_S | INGRESS_SILENCE_S | HAProxy starts anew |
| host's API servers - its ingress | `rayllm launch` | one is there | INGRESS_LEAVE_S | it ends after its connections |
| launch - Ray on its host | `rayllm launch` | raylet (and GCS, if it started them) run | - | it ends, exit code 1 |
| launch - its guard - its parent | the last two, by the ends of processes | - | - | all that was started is ended |

All values are in seconds.
"""

from __future__ import annotations

# Front and engine: what is new is said within BEAT_S; the front says something every IDLE_BEAT_S, the engine answers.
BEAT_S = 0.5
IDLE_BEAT_S = 10.0
SILENCE_S = 30.0
ASK_S = 2.0  # for an engine's answer to a question, without which things go on as if it had said nothing
CONNECTION_PING_S = 0.3
CONNECTION_SILENCE_S = 1.5  # ZeroMQ's own threads answer: neither the interpreter nor a long step holds them up
METRICS_S = 2.0  # how old the metrics in beats may be
CONNECT_S = 10.0  # for the first answer of an engine
CLOSE_S = 5.0  # for ZeroMQ to end: on rare occasions it waits for ever for a connection that was just closed
DISCONNECT_S = 0.5  # for what is still to be sent when a socket closes

# Engine: with work queued and no step finished for so long it is unhealthy.
STALL_S = 120.0

# Driver and ranks.
PING_S = 0.5
RANK_SILENCE_S = 3.0  # Python code that holds the interpreter's lock, or a host without a free core, takes less
# From a recovery until new standbys start, whose imports on a CPU slow down what is computed again.
STANDBY_DELAY_S = {"cuda": 0.5, "cpu": 5.0}
STANDBY_RETRY_S = 10.0  # between two starts of standbys
STANDBY_ANSWER_S = 1.0  # for one that is to take over; without an answer new processes start
STEP_S = {"cuda": 30.0, "cpu": 300.0}  # no step takes this long; on a CPU, a chunk may take minutes
RANK_START_SILENCE_S = 60.0  # imports hold the interpreter's lock for seconds, on a busy host for many
RANK_RESUME_SILENCE_S = 10.0  # a standby that takes over has imported all
RANK_START_S = 1800.0  # one phase of the start: loading hundreds of gigabytes from a slow disk
RANK_CONNECT_S = 60.0  # for all ranks to join the process groups
IDLE_WATCH_S = 0.5  # how often an engine without work looks at the ranks
RANK_WATCH_S = 0.2  # how often a wait for a result looks at the ranks
RANK_FAILURE_S = 3.0  # for Ray to notice why a connection broke
RANK_STOP_S = 5.0  # each wait of the shutdown
RANK_HANGUP_S = 0.3  # for gloo to notice that a process is gone: mostly at once, on rare occasions never
PLACEMENT_S = 6.0  # for resources that exist but are taken; an engine that just stopped frees its own in less

# A request whose engine died: how long its front waits for one that takes over, and how often it looks.
RESUME_S = 120.0
RESUME_POLL_S = 0.02

# Requests with an idempotency key.
KEEP_S = 60.0  # after the end of one, or after its last connection broke off, an engine has all that came of it

# Responses that run in the background. Who takes one over finds its tokens in the engine for KEEP_S.
RESPONSE_BEAT_S = 0.5  # how often its API server says that it runs, and looks whether it is to be cancelled
RESPONSE_SILENCE_S = 5.0
RESPONSE_POLL_S = 0.1  # how often its events are written, and who follows them looks for more
RESPONSE_CANCEL_S = 3.0  # for a cancelled one to end, before its API server is taken to be dead

# Batches. A host that is busy, or a folder that answers slowly, delays a beat; a batch is in no hurry.
BATCH_BEAT_S = 0.5
BATCH_SILENCE_S = 15.0  # more than STOPPED_S, after which who is stopped is killed anyway

# Grammars of structured outputs: a first, short trial, behind which others wait, and a long one for those that need it.
GRAMMAR_FIRST_S = 0.5
GRAMMAR_S = 5.0
GRAMMAR_REFUSED_S = 60.0  # how long a refusal is remembered: the machine's load may have had a part in it
MASK_S = 1.0  # of computing for one token's mask; ambiguous grammars take longer with each token
GRAMMAR_WORKER_START_S = 60.0  # a worker imports little, but the machine may be busy
GRAMMAR_WORKER_SILENCE_S = 5.0  # beyond a trial's limit, after which the worker is taken to be stuck

# Ray Serve and its replicas.
STOPPED_S = 10.0  # by SIGSTOP or the like, after which a replica is killed; it is given up long before that
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 30.0
KILL_S = 10.0  # after the time that running requests have, before Serve ends a replica by force

# Directory.
REGISTER_S = 0.5
ADAPTER_S = 300.0  # for all engines to load an adapter that a request asked for
REPORT_S = 2.0  # for `rayllm status`
MEMBER_SILENCE_S = 5.0
JOIN_S = 10.0  # for all API servers to connect to a new engine, before Serve ends the one that it replaces
DIRECTORY_S = 3.0  # for its answer; members go on without

# Hosts that are taken away.
SPOT_POLL_S = 2.0
METADATA_S = 5.0  # for an answer of a cloud's metadata service
GCP_WAIT_S = 60  # that the one of GCP waits for news
GCP_NOTICE_S = 30.0  # from the notice of GCP to the end of the host, which it does not say
LEAVE_S = 5.0  # before a host goes away, its replicas have handed their requests on

# `rayllm launch`.
FIND_CLUSTER_S = 5.0  # for the first answer of a Ray cluster that is there already
FIND_AUTOSCALER_S = 60.0  # for the head to say what its autoscaler may add; it may have to start a process for that
START_S = 1800.0
STATUS_S = 1.0
STOP_S = 20.0
INGRESS_WATCH_S = 0.25
INGRESS_ASK_S = 1.0
INGRESS_SILENCE_S = 3.0  # its answers come from a thread that also passes connections on
INGRESS_START_S = 5.0
INGRESS_LEAVE_S = 30.0  # without an API server on its host; one that has died is back in less
INGRESS_RESTART_S = 1.0  # between two starts of one that keeps dying
END_DESCENDANTS_S = 2.0
DIE_S = 8.0  # for the kernel to end a killed process, and free gigabytes of memory and a GPU

# HTTP requests.
REQUEST_S = 10.0  # to receive its headers, and what of its body fits into HAProxy's buffer beside them
BODY_S = 60.0  # to receive a request's body: who sends it slowly must not hold a place for ever
