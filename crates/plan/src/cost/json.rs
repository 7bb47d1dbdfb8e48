//! The tables of the cost model as JSON, for `--json`, and rates, for a cache. Sizes are in bytes, times in
//! seconds.

use serde_json::{Value, json};

use crate::cost::changes::{Refusal, Suggestion};
use crate::cost::memory_curve::MemoryCurve;
use crate::cost::memory_kinds::MemoryByKind;
use crate::cost::prediction::Prediction;
use crate::cost::rates::{GemmTile, MatmulRates, Rates};
use crate::cost::scaling::{ScalingRow, ScalingTable};
use crate::cost::strategies::{RunChoices, StrategyRow, StrategyTable};
use crate::lane::Lane;
use crate::memory_table::{MemoryBreakdown, MemoryGroup, TierBytes};

pub fn strategies_json(table: &StrategyTable) -> Value {
    let row = |row: &StrategyRow| {
        json!({
            "strategy": row.strategy.to_string(),
            "chosen": row.is_chosen,
            "fits": row.fits,
            "device_bytes": memory(&row.memory),
            "host_bytes": row.host.0,
            "choices": choices(&row.choices),
            "prediction": prediction(&row.prediction),
        })
    };
    json!({
        "budget_bytes": table.budget.0,
        "world_size": table.world_size,
        "strategies": table.rows.iter().map(row).collect::<Vec<_>>(),
        "chosen": table.choice.strategy.to_string(),
        "reason": table.choice.reason,
        "next_best": table.next.as_ref().map(choices),
    })
}

fn choices(choices: &RunChoices) -> Value {
    json!({
        "strategy": choices.strategy.to_string(),
        "per_device_train_batch_size": choices.rows,
        "gradient_accumulation_steps": choices.num_micro_batches,
        "text": choices.to_string(),
        "step_seconds": choices.step_seconds,
    })
}

fn memory(memory: &MemoryByKind) -> Value {
    let mut kinds: serde_json::Map<String, Value> =
        memory.rows().map(|(name, bytes)| (name.to_string(), json!(bytes.0))).into_iter().collect();
    kinds.insert("total".into(), json!(memory.total().0));
    Value::Object(kinds)
}

fn prediction(prediction: &Prediction) -> Value {
    let busy: serde_json::Map<String, Value> = Lane::ALL
        .map(|lane| (lane.to_string(), json!(prediction.busy_seconds[lane as usize])))
        .into_iter()
        .collect();
    json!({
        "step_seconds": prediction.step_seconds,
        "exposed_communication_seconds": prediction.exposed_comm_seconds,
        "busy_seconds": busy,
        "sent_bytes": prediction.sent.0,
        "tokens_per_second": prediction.tokens_per_s,
        "mfu": prediction.mfu,
    })
}

pub fn refusal_json(refusal: &Refusal) -> Value {
    let suggestion = |suggestion: &Suggestion| {
        json!({
            "changes": suggestion.changes.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "device_bytes": suggestion.device.0,
            "host_bytes": suggestion.host.0,
            "step_seconds": suggestion.step_seconds,
            "tokens_per_second": suggestion.tokens_per_s,
        })
    };
    json!({
        "needed_bytes": refusal.needed.0,
        "budget_bytes": refusal.budget.0,
        "step_seconds": refusal.step_seconds,
        "suggestions": refusal.suggestions.iter().map(suggestion).collect::<Vec<_>>(),
    })
}

pub fn scaling_json(table: &ScalingTable) -> Value {
    let row = |row: &ScalingRow| {
        json!({
            "gpus": row.ranks,
            "nodes": row.nodes,
            "strategy": row.strategy.to_string(),
            "device_bytes": row.device.0,
            "fits": row.fits,
            "step_seconds": row.step_seconds,
            "exposed_communication_seconds": row.exposed_comm_seconds,
            "tokens_per_second": row.tokens_per_s,
            "mfu": row.mfu,
            "efficiency": row.efficiency,
        })
    };
    json!({
        "rows": table.rows.iter().map(row).collect::<Vec<_>>(),
        "communication_takes_over_at_gpus": table.takes_over,
    })
}

pub fn curve_json(curve: &MemoryCurve) -> Value {
    json!({
        "phase": curve.phase,
        "resident_bytes": curve.residents.0,
        "peak_bytes": curve.peak().0,
        "live_bytes": curve.points.iter().map(|point| point.live.0).collect::<Vec<_>>(),
    })
}

/// Where a rank's bytes go: the groups of the memory table with their parts.
pub fn memory_json(memory: &MemoryBreakdown) -> Value {
    let tiers = |[device, host, nvme]: TierBytes| json!({ "device_bytes": device.0, "host_bytes": host.0, "nvme_bytes": nvme.0 });
    let named = |name: &str, bytes: TierBytes| {
        let mut value = tiers(bytes);
        value["name"] = name.into();
        value
    };
    let group = |group: &MemoryGroup| {
        let mut value = named(&group.name, group.bytes);
        value["parts"] = group.parts.iter().map(|(name, bytes)| named(name, *bytes)).collect();
        value
    };
    json!({
        "residents": group(&memory.residents),
        "phases": memory.phases.iter().map(group).collect::<Vec<_>>(),
        "overhead": tiers(memory.overhead),
        "total": tiers(memory.total),
    })
}

/// Rates as a caller caches them.
pub fn rates_json(rates: &Rates) -> Value {
    let Rates { matmul, gemm_tile, .. } = rates;
    json!({
        "matmul_flops_per_s": { "f32": matmul.f32, "bf16": matmul.bf16, "f16": matmul.f16 },
        "attention_share": rates.attention_share,
        "gemm_units": rates.gemm_units,
        "gemm_tile": [gemm_tile.rows, gemm_tile.cols, gemm_tile.inner],
        "memory_bytes_per_s": rates.memory_bytes_per_s,
        "sustained_share": rates.sustained_share,
        "kernel_seconds": rates.kernel_seconds,
        "host_link_bytes_per_s": rates.host_link_bytes_per_s,
        "nvme_read_bytes_per_s": rates.nvme_read_bytes_per_s,
        "nvme_write_bytes_per_s": rates.nvme_write_bytes_per_s,
        "host_update_bytes_per_s": rates.host_update_bytes_per_s,
        "lanes_share_cores": rates.lanes_share_cores,
        "peak_flops_per_s": rates.peak_flops_per_s,
    })
}

/// Cached rates. `None`: a number is missing or is not a rate, so the caller measures again.
pub fn rates_from_json(json: &Value) -> Option<Rates> {
    fn rate(value: &Value) -> Option<f64> {
        value.as_f64().filter(|rate| rate.is_finite() && *rate > 0.0)
    }
    let matmul = &json["matmul_flops_per_s"];
    let side = |i: usize| json["gemm_tile"][i].as_u64().filter(|side| *side > 0).map(|side| side as usize);
    let units = json["gemm_units"].as_u64().and_then(|units| u32::try_from(units).ok());
    Some(Rates {
        matmul: MatmulRates {
            f32: rate(&matmul["f32"])?,
            bf16: rate(&matmul["bf16"])?,
            f16: rate(&matmul["f16"])?,
        },
        attention_share: rate(&json["attention_share"])?,
        gemm_units: units.filter(|units| *units > 0)?,
        gemm_tile: GemmTile { rows: side(0)?, cols: side(1)?, inner: side(2)? },
        memory_bytes_per_s: rate(&json["memory_bytes_per_s"])?,
        sustained_share: rate(&json["sustained_share"])?,
        kernel_seconds: json["kernel_seconds"].as_f64().filter(|seconds| *seconds >= 0.0)?,
        host_link_bytes_per_s: rate(&json["host_link_bytes_per_s"])?,
        nvme_read_bytes_per_s: rate(&json["nvme_read_bytes_per_s"])?,
        nvme_write_bytes_per_s: rate(&json["nvme_write_bytes_per_s"])?,
        host_update_bytes_per_s: rate(&json["host_update_bytes_per_s"])?,
        lanes_share_cores: json["lanes_share_cores"].as_bool()?,
        peak_flops_per_s: rate(&json["peak_flops_per_s"])?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_survive_a_cache() {
        let rates = Rates::generic_cpu(2);
        let json = rates_json(&rates);
        assert_eq!(rates_from_json(&json), Some(rates));
        for key in json.as_object().unwrap().keys() {
            let mut damaged = json.clone();
            damaged.as_object_mut().unwrap().remove(key);
            assert_eq!(rates_from_json(&damaged), None, "without {key}");
            damaged[key] = json!(-1.0);
            assert_eq!(rates_from_json(&damaged), None, "with a negative {key}");
        }
    }
}
