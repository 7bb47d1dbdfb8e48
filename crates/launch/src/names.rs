//! The environment variables of a run. This module only names them; the caller reads and sets them.

/// The rank of this process. Read and set.
pub const RANK: &str = "RANK";
/// The number of ranks. Read and set.
pub const WORLD_SIZE: &str = "WORLD_SIZE";
/// The index of this process among the ranks of its node. Read and set.
pub const LOCAL_RANK: &str = "LOCAL_RANK";
/// The number of ranks on each node. Read and set.
pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
/// The index of the node. Read and set.
pub const GROUP_RANK: &str = "GROUP_RANK";
/// Another name for [`GROUP_RANK`]. Read and set.
pub const NODE_RANK: &str = "NODE_RANK";
/// The host of rank 0. Read and set.
pub const MASTER_ADDR: &str = "MASTER_ADDR";
/// The port of the rendezvous on that host. Read and set.
pub const MASTER_PORT: &str = "MASTER_PORT";
/// `True` if torchrun's own store uses [`MASTER_PORT`]; the rendezvous then uses the next higher port. Read.
pub const TORCHELASTIC_USE_AGENT_STORE: &str = "TORCHELASTIC_USE_AGENT_STORE";
/// How many times torchrun has restarted the ranks. Read if [`RESTART`] is not set.
pub const TORCHELASTIC_RESTART_COUNT: &str = "TORCHELASTIC_RESTART_COUNT";
/// The port of the rendezvous; overrides [`MASTER_PORT`]. Read.
pub const PORT: &str = "LOCKSTEP_PORT";
/// The run's token, the secret that allows a process to join. Read and set.
pub const TOKEN: &str = "LOCKSTEP_TOKEN";
/// A file that holds the token and that only its owner can read. Read.
pub const TOKEN_FILE: &str = "LOCKSTEP_TOKEN_FILE";
/// `launcher` if the launcher of node 0 runs the rendezvous, and not rank 0. Set.
pub const SERVER: &str = "LOCKSTEP_SERVER";
/// The process id of the launcher. A rank ends when the launcher does. Set.
pub const LAUNCHER_PID: &str = "LOCKSTEP_LAUNCHER_PID";
/// Identifies a launch; stays the same after a restart. Set.
pub const LAUNCH_ID: &str = "LOCKSTEP_LAUNCH_ID";
/// torchrun's run id, or `none` if its user set none. Read if [`LAUNCH_ID`] is not set.
pub const TORCHELASTIC_RUN_ID: &str = "TORCHELASTIC_RUN_ID";
/// The file to which a failing rank writes its error, for the launcher to report. Set.
pub const ERROR_FILE: &str = "LOCKSTEP_ERROR_FILE";
/// How many times the ranks have been restarted. Set.
pub const RESTART: &str = "LOCKSTEP_RESTART";
/// Seconds that ranks wait for each other at the start. Set.
pub const JOIN_TIMEOUT: &str = "LOCKSTEP_JOIN_TIMEOUT";
/// `0` disables pinning ranks to cores. Read.
pub const PIN: &str = "LOCKSTEP_PIN";
/// The folder of compiled GPU kernels, if not the user's cache. Read.
pub const KERNEL_CACHE: &str = "LOCKSTEP_KERNEL_CACHE";
/// For tests: `RANK/NAME:PASSES` makes a rank panic at a named point in the code. Read.
pub const FAILPOINT: &str = "LOCKSTEP_FAILPOINT";
/// The GPUs that are visible to a process. Read by the driver, never changed.
pub const CUDA_VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
/// The algorithms that NCCL may use. Read, also by NCCL.
pub const NCCL_ALGO: &str = "NCCL_ALGO";
/// `0` stops NCCL from reducing in switches, so that a run repeats bit for bit. Set, unless this or [`NCCL_ALGO`] is
/// already set.
pub const NCCL_NVLS_ENABLE: &str = "NCCL_NVLS_ENABLE";
/// The host that NCCL takes a rank to be on. If ranks share a GPU it is set, unless it already is, because NCCL
/// allows sharing only between different hosts.
pub const NCCL_HOSTID: &str = "NCCL_HOSTID";
/// The network interface between ranks. Set together with [`NCCL_HOSTID`] on a single node.
pub const NCCL_SOCKET_IFNAME: &str = "NCCL_SOCKET_IFNAME";
/// `1` stops NCCL from using InfiniBand. Set together with [`NCCL_HOSTID`] on a single node.
pub const NCCL_IB_DISABLE: &str = "NCCL_IB_DISABLE";
/// This rank and the number of ranks, as MPICH's mpiexec and Slurm's pmi2 set them. Read.
pub const PMI_RANK: &str = "PMI_RANK";
/// See [`PMI_RANK`].
pub const PMI_SIZE: &str = "PMI_SIZE";
/// The name by which MPICH's mpiexec reaches this host. Read.
pub const PMI_HOSTNAME: &str = "PMI_HOSTNAME";
/// The position among the ranks of this host, and their number, as MPICH's mpiexec sets them. Read.
pub const MPI_LOCALRANKID: &str = "MPI_LOCALRANKID";
/// See [`MPI_LOCALRANKID`].
pub const MPI_LOCALNRANKS: &str = "MPI_LOCALNRANKS";
/// This rank, as launchers with PMIx set it. Read.
pub const PMIX_RANK: &str = "PMIX_RANK";
/// This rank, the number of ranks, and the same on this host, as Open MPI's mpiexec sets them. Read.
pub const OMPI_COMM_WORLD_RANK: &str = "OMPI_COMM_WORLD_RANK";
/// See [`OMPI_COMM_WORLD_RANK`].
pub const OMPI_COMM_WORLD_SIZE: &str = "OMPI_COMM_WORLD_SIZE";
/// See [`OMPI_COMM_WORLD_RANK`].
pub const OMPI_COMM_WORLD_LOCAL_RANK: &str = "OMPI_COMM_WORLD_LOCAL_RANK";
/// See [`OMPI_COMM_WORLD_RANK`].
pub const OMPI_COMM_WORLD_LOCAL_SIZE: &str = "OMPI_COMM_WORLD_LOCAL_SIZE";
/// The number of ranks that srun has started. Read if [`PMIX_RANK`] or [`PMI_RANK`] is set.
pub const SLURM_STEP_NUM_TASKS: &str = "SLURM_STEP_NUM_TASKS";
/// The number of ranks on each host of srun's step, such as `4(x2)`. Read if [`PMIX_RANK`] or [`PMI_RANK`] is set.
pub const SLURM_STEP_TASKS_PER_NODE: &str = "SLURM_STEP_TASKS_PER_NODE";
/// The position among srun's ranks of this host. Read if [`PMIX_RANK`] or [`PMI_RANK`] is set.
pub const SLURM_LOCALID: &str = "SLURM_LOCALID";
/// The folder of the MPI library, and of no other. Read.
pub const MPI_DIR: &str = "LOCKSTEP_MPI_DIR";
/// This task, and the number of tasks of a step or of its job, without MPI. Read.
pub const SLURM_PROCID: &str = "SLURM_PROCID";
/// Read where [`SLURM_STEP_NUM_TASKS`] is not set.
pub const SLURM_NTASKS: &str = "SLURM_NTASKS";
/// The tasks on each host of the job, such as `4(x2)`. Read where [`SLURM_STEP_TASKS_PER_NODE`] is not set.
pub const SLURM_TASKS_PER_NODE: &str = "SLURM_TASKS_PER_NODE";
/// See [`SLURM_TASKS_PER_NODE`].
pub const SLURM_NTASKS_PER_NODE: &str = "SLURM_NTASKS_PER_NODE";
/// The number of srun's step. Read, to tell a step from the script of a job.
pub const SLURM_STEP_ID: &str = "SLURM_STEP_ID";
/// The older name of [`SLURM_STEP_ID`]. Read.
pub const SLURM_STEPID: &str = "SLURM_STEPID";
/// The hosts of the step, or else of the job; the first one is that of rank 0. Read.
pub const SLURM_STEP_NODELIST: &str = "SLURM_STEP_NODELIST";
/// See [`SLURM_STEP_NODELIST`].
pub const SLURM_JOB_NODELIST: &str = "SLURM_JOB_NODELIST";
/// See [`SLURM_STEP_NODELIST`].
pub const SLURM_NODELIST: &str = "SLURM_NODELIST";
/// The nodes of the step. Read by a launcher that srun starts on every node.
pub const SLURM_STEP_NUM_NODES: &str = "SLURM_STEP_NUM_NODES";
/// The nodes of the job. Read where [`SLURM_STEP_NUM_NODES`] is not set.
pub const SLURM_NNODES: &str = "SLURM_NNODES";
/// The index of the node in its step. Read by a launcher that srun starts on every node.
pub const SLURM_NODEID: &str = "SLURM_NODEID";
/// The number of the job; the port of the rendezvous is derived from it. Read.
pub const SLURM_JOB_ID: &str = "SLURM_JOB_ID";
/// torchrun's `--nnodes`, as Kubeflow sets it. Read by the launcher.
pub const PET_NNODES: &str = "PET_NNODES";
/// torchrun's `--node-rank`. Read by the launcher.
pub const PET_NODE_RANK: &str = "PET_NODE_RANK";
/// torchrun's `--nproc-per-node`. Read by the launcher.
pub const PET_NPROC_PER_NODE: &str = "PET_NPROC_PER_NODE";
/// torchrun's `--master-addr`. Read by the launcher.
pub const PET_MASTER_ADDR: &str = "PET_MASTER_ADDR";
/// torchrun's `--master-port`. Read by the launcher.
pub const PET_MASTER_PORT: &str = "PET_MASTER_PORT";
/// The number of nodes of a SkyPilot task. Read by the launcher.
pub const SKYPILOT_NUM_NODES: &str = "SKYPILOT_NUM_NODES";
/// The index of this node. Read by the launcher.
pub const SKYPILOT_NODE_RANK: &str = "SKYPILOT_NODE_RANK";
/// The addresses of the nodes, a line each. Read by the launcher.
pub const SKYPILOT_NODE_IPS: &str = "SKYPILOT_NODE_IPS";
/// The GPUs of each node: so many ranks, unless `--nproc` or the configuration says otherwise. Read by the launcher.
pub const SKYPILOT_NUM_GPUS_PER_NODE: &str = "SKYPILOT_NUM_GPUS_PER_NODE";
/// The index of a pod in an Indexed Job of Kubernetes, which is its node. Read by the launcher of several nodes.
pub const JOB_COMPLETION_INDEX: &str = "JOB_COMPLETION_INDEX";
