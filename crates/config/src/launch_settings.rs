//! What the launcher needs to know: processes, nodes and addresses. Files and launch lines of other launchers set it.

use crate::error::Problem;
use crate::keys;
use crate::origin::printable;
use crate::raw::{RawConfig, Setting};
use crate::settle::conflict;
use crate::value;
use crate::yaml::{Node, Value};

/// Settings of the launcher. `None`: the launcher's default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaunchSettings {
    pub nodes: Option<u32>,
    pub nproc_per_node: Option<NumProcesses>,
    pub node_rank: Option<u32>,
    pub master_addr: Option<String>,
    pub master_port: Option<u16>,
    /// Indices of GPUs, as in `CUDA_VISIBLE_DEVICES`.
    pub gpu_ids: Option<String>,
    /// DeepSpeed's list of nodes.
    pub hostfile: Option<String>,
    /// DeepSpeed's filter of nodes and GPUs to use.
    pub include: Option<String>,
    /// DeepSpeed's filter of nodes and GPUs not to use.
    pub exclude: Option<String>,
    pub max_restarts: Option<u32>,
    /// torchrun's bit mask of what ranks copy into files.
    pub tee: Option<String>,
    pub log_dir: Option<String>,
    /// One node with a free port.
    pub standalone: bool,
    /// Environment variables in front of the launch line.
    pub variables: Vec<(String, String)>,
}

/// Processes per node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumProcesses {
    Count(u32),
    /// One per GPU of the node.
    PerGpu,
}

/// A setting of the launcher, before it is typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LaunchKey {
    /// Per node: a number, `gpu`, `cpu` or `auto`.
    Nproc,
    /// Of all nodes.
    NumProcesses,
    NodeRank,
    MasterAddr,
    MasterPort,
    /// torchrun's `--rdzv_endpoint host:port`.
    Endpoint,
    GpuIds,
    Hostfile,
    Include,
    Exclude,
    MaxRestarts,
    Tee,
    LogDir,
    Standalone,
}

impl LaunchSettings {
    /// The flags of `lockstep train` for these settings. `nodes` and `nproc_per_node` are left out: they are also keys of
    /// the configuration.
    pub fn flags(&self) -> Vec<String> {
        let mut flags = Vec::new();
        let mut add = |name: &str, value: Option<String>| {
            flags.extend(value.map(|value| format!("{name} {value}")));
        };
        if self.nproc_per_node == Some(NumProcesses::PerGpu) {
            add("--nproc", Some("gpu".into()));
        }
        add("--node-rank", self.node_rank.map(|rank| rank.to_string()));
        add("--master-addr", self.master_addr.clone());
        add("--master-port", self.master_port.map(|port| port.to_string()));
        add("--max-restarts", self.max_restarts.map(|n| n.to_string()));
        add("--tee", self.tee.clone());
        if self.standalone {
            flags.push("--standalone".into());
        }
        flags
    }

    /// Types the settings, after all keys have one value. Also derives `nproc_per_node` from the number of all
    /// processes.
    pub(crate) fn settle(raw: &mut RawConfig<'_>) -> Self {
        use LaunchKey as K;
        let mut settings = LaunchSettings {
            node_rank: count(raw, K::NodeRank),
            master_addr: text(raw, K::MasterAddr),
            master_port: count(raw, K::MasterPort),
            gpu_ids: text(raw, K::GpuIds),
            hostfile: text(raw, K::Hostfile),
            include: text(raw, K::Include),
            exclude: text(raw, K::Exclude),
            max_restarts: count(raw, K::MaxRestarts),
            tee: text(raw, K::Tee),
            log_dir: text(raw, K::LogDir),
            standalone: setting(raw, K::Standalone).is_some_and(|given| given.node.bool() == Some(true)),
            variables: raw.texts.launch_line.map(|line| line.variables.clone()).unwrap_or_default(),
            nodes: None,
            nproc_per_node: None,
        };
        read_endpoint(raw, &mut settings);
        read_nproc(raw, &mut settings);
        split_processes(raw);
        let given = |key: &str| raw.given.get(key).and_then(|given| given.node.integer());
        let small = |n: i128| u32::try_from(n).ok();
        settings.nodes = given("nodes").and_then(small);
        let nproc = given("nproc_per_node").and_then(small).map(NumProcesses::Count);
        settings.nproc_per_node = nproc.or(settings.nproc_per_node);
        settings
    }
}

/// The value of the highest level; values of one level must agree.
fn setting(raw: &mut RawConfig<'_>, key: LaunchKey) -> Option<Setting> {
    let of_key: Vec<Setting> =
        raw.launch.iter().filter(|(k, _)| *k == key).map(|(_, given)| given.clone()).collect();
    let highest = of_key.iter().map(|given| given.key_at.from.level()).max()?;
    let mut of_level = of_key.into_iter().filter(|given| given.key_at.from.level() == highest);
    let first = of_level.next()?;
    let others: Vec<Setting> =
        of_level.filter(|other| !value::same(&first.node, &other.node, false)).collect();
    for other in others {
        let error =
            conflict(&raw.texts, &first, &other, "both are the same setting of the launcher; keep one.");
        raw.errors.push(error);
    }
    Some(first)
}

fn text(raw: &mut RawConfig<'_>, key: LaunchKey) -> Option<String> {
    let given = setting(raw, key)?;
    match given.node.text() {
        Some(text) if !text.trim().is_empty() => Some(text.to_owned()),
        _ => {
            wrong(raw, &given, "a word");
            None
        }
    }
}

fn count<T: TryFrom<i128>>(raw: &mut RawConfig<'_>, key: LaunchKey) -> Option<T> {
    let given = setting(raw, key)?;
    let number = given.node.integer().and_then(|n| T::try_from(n).ok());
    if number.is_none() {
        wrong(raw, &given, "a whole number");
    }
    number
}

fn wrong(raw: &mut RawConfig<'_>, given: &Setting, expected: &'static str) {
    let (key, found) = (printable(&given.spelled), value::describe(&given.node.value));
    raw.fail(Problem::WrongType { key, expected, found }, given.node.at);
}

/// `--rdzv_endpoint alpha:29500`.
fn read_endpoint(raw: &mut RawConfig<'_>, settings: &mut LaunchSettings) {
    let Some(given) = setting(raw, LaunchKey::Endpoint) else { return };
    let text = given.node.text().unwrap_or_default();
    let (host, port) = text.rsplit_once(':').map_or((text, None), |(host, port)| (host, Some(port)));
    let number = port.map(str::parse::<u16>);
    if host.is_empty() || matches!(number, Some(Err(_))) {
        return wrong(raw, &given, "HOST:PORT");
    }
    settings.master_addr.get_or_insert(host.to_owned());
    if let (Some(Ok(port)), None) = (number, settings.master_port) {
        // Port 0 lets torchrun choose.
        settings.master_port = Some(port).filter(|port| *port != 0);
    }
}

/// A number becomes our key `nproc_per_node`; `gpu` and `auto` are for the launcher to count.
fn read_nproc(raw: &mut RawConfig<'_>, settings: &mut LaunchSettings) {
    let Some(given) = setting(raw, LaunchKey::Nproc) else { return };
    match given.node.text() {
        Some("gpu" | "auto") => settings.nproc_per_node = Some(NumProcesses::PerGpu),
        Some("cpu") => {
            let problem = Problem::PeerValueNotImplemented {
                key: printable(&given.spelled),
                value: "cpu".into(),
                instead: "write the number of processes.",
            };
            raw.fail(problem, given.node.at);
        }
        _ => insert(raw, given),
    }
}

/// Derives the processes per node from all processes and nodes.
fn split_processes(raw: &mut RawConfig<'_>) {
    let Some(mut given) = setting(raw, LaunchKey::NumProcesses) else { return };
    if matches!(given.node.text(), Some("gpu" | "auto")) {
        return;
    }
    let nodes = raw.given.get("nodes").and_then(|nodes| nodes.node.integer()).unwrap_or(1).max(1);
    match given.node.integer() {
        Some(all) if all >= 1 && all % nodes == 0 => {
            given.written = Some(all.to_string());
            let text = (all / nodes).to_string();
            given.node = Node { value: Value::Scalar { text, plain: true }, at: given.node.at };
            insert(raw, given);
        }
        Some(all) if all >= 1 => {
            let rule = format!("a multiple of the number of nodes, {nodes}");
            let problem = Problem::OutOfRange {
                key: printable(&given.spelled),
                value: all.to_string(),
                rule: rule.into(),
                hint: "every node has the same number of processes.".into(),
            };
            raw.fail(problem, given.node.at);
        }
        _ => wrong(raw, &given, "a number of processes, at least 1"),
    }
}

/// Sets `nproc_per_node`, unless an input of a higher level does.
fn insert(raw: &mut RawConfig<'_>, given: Setting) {
    let key = keys::key("nproc_per_node").name;
    match raw.given.get(key) {
        Some(other) if other.key_at.from.level() > given.key_at.from.level() => {}
        Some(other)
            if other.key_at.from.level() == given.key_at.from.level()
                && !value::same(&other.node, &given.node, false) =>
        {
            let error = conflict(&raw.texts, other, &given, "both set the number of processes; keep one.");
            raw.errors.push(error);
        }
        _ => _ = raw.given.insert(key, given),
    }
}
