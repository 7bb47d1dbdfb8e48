//! The tables of the cost model as JSON, for `--json`. Sizes are in bytes, times in seconds.

use serde_json::{Value, json};

use crate::cost::changes::{Refusal, Suggestion};
use crate::cost::memory_curve::MemoryCurve;
use crate::cost::memory_kinds::MemoryByKind;
use crate::cost::prediction::Prediction;
use crate::cost::scaling::{ScalingRow, ScalingTable};
use crate::cost::strategies::{StrategyRow, StrategyTable};
use crate::schedule::Lane;

pub fn strategies_json(table: &StrategyTable) -> Value {
    let row = |row: &StrategyRow| {
        json!({
            "strategy": row.strategy.to_string(),
            "chosen": row.is_chosen,
            "fits": row.fits,
            "device_bytes": memory(&row.memory),
            "host_bytes": row.host.0,
            "prediction": prediction(&row.prediction),
        })
    };
    json!({
        "budget_bytes": table.budget.0,
        "world_size": table.world_size,
        "strategies": table.rows.iter().map(row).collect::<Vec<_>>(),
        "chosen": table.choice.strategy.to_string(),
        "reason": table.choice.reason,
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
