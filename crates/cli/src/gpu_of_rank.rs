//! The GPU of each rank, and the settings that NCCL needs if ranks share one.

use std::fmt;

use lockstep_config::{DeviceConfig, DeviceKind};
use lockstep_core::{Fault, FaultClass};
use lockstep_launch::names;

/// A host with fewer GPUs than ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TooManyRanks {
    pub(crate) ranks: u32,
    pub(crate) gpus: u32,
}

impl fmt::Display for TooManyRanks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.gpus == 1 { "" } else { "s" };
        write!(f, "{} ranks on a host with {} visible GPU{plural}", self.ranks, self.gpus)
    }
}

impl std::error::Error for TooManyRanks {}

impl Fault for TooManyRanks {
    fn class(&self) -> FaultClass {
        FaultClass::BadConfig
    }

    fn hint(&self) -> Option<String> {
        Some(format!(
            "Start {} with --nproc gpu, or let ranks share GPUs with `share_gpus: true`, which is slow; \
             `device: cpu` uses none. CUDA_VISIBLE_DEVICES determines which GPUs are visible.",
            self.gpus
        ))
    }
}

/// The GPU of a rank, for `ranks` ranks and at least one GPU on its host. Ranks that share GPUs take them in turn.
pub(crate) fn ordinal(local_rank: u32, ranks: u32, gpus: u32, share: bool) -> Result<u32, TooManyRanks> {
    assert!(gpus > 0 && local_rank < ranks, "rank {local_rank} of {ranks} on {gpus} GPUs");
    if ranks > gpus && !share {
        return Err(TooManyRanks { ranks, gpus });
    }
    Ok(local_rank % gpus)
}

/// A host, as its launcher sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Host<'a> {
    pub(crate) name: &'a str,
    pub(crate) nodes: u32,
    pub(crate) ranks: u32,
    /// Visible GPUs.
    pub(crate) gpus: u32,
}

/// Environment variables for ranks on GPUs, by local rank. Variables that the user has set are left alone.
pub(crate) fn variables(
    device: DeviceConfig,
    host: Host<'_>,
    is_set: &dyn Fn(&str) -> bool,
) -> Result<Vec<Vec<(String, String)>>, TooManyRanks> {
    if device.kind == DeviceKind::Cpu || host.gpus == 0 {
        return Ok(Vec::new());
    }
    ordinal(0, host.ranks, host.gpus, device.share_gpus)?;
    let of_rank = |rank: u32| {
        let mut given: Vec<(&str, String)> = Vec::new();
        // Switches sum in any order, so that a run would not be reproducible bit for bit.
        if !is_set(names::NCCL_ALGO) {
            given.push((names::NCCL_NVLS_ENABLE, "0".into()));
        }
        if host.ranks > host.gpus {
            // NCCL refuses two ranks of one host on one GPU, but does not check this between hosts.
            given.push((names::NCCL_HOSTID, format!("{}-{rank}", host.name)));
            if host.nodes == 1 {
                given.push((names::NCCL_SOCKET_IFNAME, "lo".into()));
                given.push((names::NCCL_IB_DISABLE, "1".into()));
            }
        }
        given
            .into_iter()
            .filter(|(name, _)| !is_set(name))
            .map(|(name, value)| (name.into(), value))
            .collect()
    };
    Ok((0..host.ranks).map(of_rank).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_takes_its_own_gpu_or_shares() {
        let all = |ranks, gpus, share| {
            (0..ranks).map(|r| ordinal(r, ranks, gpus, share).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(all(4, 8, false), [0, 1, 2, 3]);
        assert_eq!(all(5, 2, true), [0, 1, 0, 1, 0]);
        let refused = ordinal(0, 4, 1, false).unwrap_err();
        assert_eq!(refused.to_string(), "4 ranks on a host with 1 visible GPU");
        let hint = refused.hint().unwrap();
        assert!(hint.contains("share_gpus: true") && hint.contains("Start 1 "), "{hint}");
        assert_eq!(ordinal(7, 8, 3, false).unwrap_err().to_string(), "8 ranks on a host with 3 visible GPUs");
    }

    const NOTHING: &dyn Fn(&str) -> bool = &|_| false;

    /// The variables of each rank, as `name=value`.
    fn given(share_gpus: bool, host: Host<'_>, is_set: &dyn Fn(&str) -> bool) -> Vec<String> {
        let device = DeviceConfig { kind: DeviceKind::Auto, share_gpus, tf32: false };
        let all = variables(device, host, is_set).unwrap();
        let line = |one: &Vec<(String, String)>| {
            one.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
        };
        all.iter().map(line).collect()
    }

    #[test]
    fn variables_for_nccl() {
        let host = Host { name: "alpha", nodes: 1, ranks: 2, gpus: 2 };
        assert_eq!(given(true, host, NOTHING), ["NCCL_NVLS_ENABLE=0"; 2]);
        assert_eq!(given(false, host, &|name| name == "NCCL_ALGO"), ["", ""]);
        assert_eq!(given(false, host, &|name| name == "NCCL_NVLS_ENABLE"), ["", ""]);
        assert!(given(false, Host { gpus: 0, ..host }, NOTHING).is_empty());
        let shared = Host { gpus: 1, ..host };
        assert_eq!(
            given(true, shared, NOTHING),
            [
                "NCCL_NVLS_ENABLE=0 NCCL_HOSTID=alpha-0 NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1",
                "NCCL_NVLS_ENABLE=0 NCCL_HOSTID=alpha-1 NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1",
            ]
        );
        // Several hosts use any network between them.
        assert_eq!(
            given(true, Host { nodes: 2, ..shared }, &|name| name == "NCCL_NVLS_ENABLE"),
            ["NCCL_HOSTID=alpha-0", "NCCL_HOSTID=alpha-1"]
        );
        let device = DeviceConfig { kind: DeviceKind::Cuda, share_gpus: false, tf32: false };
        assert_eq!(variables(device, shared, NOTHING), Err(TooManyRanks { ranks: 2, gpus: 1 }));
        let cpu = DeviceConfig { kind: DeviceKind::Cpu, ..device };
        assert_eq!(variables(cpu, shared, NOTHING), Ok(Vec::new()));
    }
}
