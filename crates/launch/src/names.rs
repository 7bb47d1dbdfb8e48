//! The environment variables of a run, with what they say. The caller reads them; this is the list.

/// This process's number among all ranks. Read and set.
pub const RANK: &str = "RANK";
/// How many ranks there are. Read and set.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// This process's number among the ranks of its node. Read and set.
pub const LOCAL_RANK: &str = "LOCAL_RANK";
/// How many ranks each node has. Read and set.
pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
/// The node's number. Read and set.
pub const GROUP_RANK: &str = "GROUP_RANK";
/// Another name for [`GROUP_RANK`]. Read and set.
pub const NODE_RANK: &str = "NODE_RANK";
/// The host of rank 0. Read and set.
pub const MASTER_ADDR: &str = "MASTER_ADDR";
/// The port of the rendezvous on that host. Read and set.
pub const MASTER_PORT: &str = "MASTER_PORT";
/// `True` where torchrun's own store holds [`MASTER_PORT`]: the rendezvous is then one port higher. Read.
pub const TORCHELASTIC_USE_AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
/// How often torchrun has restarted the ranks. Read where [`RESTART`] is not set.
pub const TORCHELASTIC_RESTART_COUNT: &str = "TORCHELASTIC_RESTART_COUNT";
/// Port of the rendezvous, whatever [`MASTER_PORT`] says. Read.
pub const PORT: &str = "LOCKSTEP_PORT";
/// The run's token: whoever knows it may join. Read and set.
pub const TOKEN: &str = "LOCKSTEP_TOKEN";
/// A file, readable by its owner alone, that holds the token. Read.
pub const TOKEN_FILE: &str = "LOCKSTEP_TOKEN_FILE";
/// `launcher` where the rendezvous is in the launcher of node 0, not in rank 0. Set.
pub const SERVER: &str = "LOCKSTEP_SERVER";
/// The process a rank must not outlive. Set.
pub const LAUNCHER_PID: &str = "LOCKSTEP_LAUNCHER_PID";
/// Tells a launch from all others; the same after a restart. Set.
pub const LAUNCH_ID: &str = "LOCKSTEP_LAUNCH_ID";
/// The same of torchrun, where its user gave it one: `none` otherwise. Read where [`LAUNCH_ID`] is not set.
pub const TORCHELASTIC_RUN_ID: &str = "TORCHELASTIC_RUN_ID";
/// Where a rank that fails writes why, for the launcher to tell. Set.
pub const ERROR_FILE: &str = "LOCKSTEP_ERROR_FILE";
/// How often the ranks have been restarted. Set.
pub const RESTART: &str = "LOCKSTEP_RESTART";
/// Seconds that ranks wait for each other at the start. Set.
pub const JOIN_TIMEOUT: &str = "LOCKSTEP_JOIN_TIMEOUT";
/// `0`: ranks are not pinned to cores. Read.
pub const PIN: &str = "LOCKSTEP_PIN";
/// For tests: `RANK/NAME:PASSES` makes a rank panic at a named place of the code. Read.
pub const FAILPOINT: &str = "LOCKSTEP_FAILPOINT";
/// The GPUs that a process is shown. Read by the driver, and left as it is.
pub const CUDA_VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
/// Which algorithms NCCL may use. Read, by NCCL too.
pub const NCCL_ALGO: &str = "NCCL_ALGO";
/// `0`: NCCL does not sum in switches, so that a run repeats bit for bit. Set, unless this or [`NCCL_ALGO`] is.
pub const NCCL_NVLS_ENABLE: &str = "NCCL_NVLS_ENABLE";
/// Which host a rank passes for. Set, unless it is, where ranks share a GPU, which NCCL lets only those of several
/// hosts do.
pub const NCCL_HOSTID: &str = "NCCL_HOSTID";
/// The network interface by which ranks reach each other. Set with [`NCCL_HOSTID`] where there is one node.
pub const NCCL_SOCKET_IFNAME: &str = "NCCL_SOCKET_IFNAME";
/// `1`: NCCL does not look for InfiniBand. Set with [`NCCL_HOSTID`] where there is one node.
pub const NCCL_IB_DISABLE: &str = "NCCL_IB_DISABLE";
