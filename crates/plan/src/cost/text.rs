//! Prints the tables of the cost model.

use std::fmt::Write;

use lockstep_core::Bytes;
use lockstep_shape::Recompute;

use crate::buffer::MemoryTier;
use crate::cost::changes::{Change, Refusal, Suggestion};
use crate::cost::scaling::{ScalingRow, ScalingTable};
use crate::cost::strategies::{RunChoices, StrategyRow, StrategyTable};
use crate::cost::table::{columns, count_text, percent_text, seconds_text};
use crate::input::RecomputePolicy;
use crate::lane::Lane;

/// The table of all strategies: device memory of a rank by kind, bytes that a rank sends, predicted times. `*` marks
/// the chosen one.
pub fn strategies_text(table: &StrategyTable) -> String {
    let has_comm = table.world_size > 1;
    // Without offload the host's memory does not depend on the strategy.
    let copies = |row: &StrategyRow| row.prediction.busy_seconds[Lane::Copy as usize] > 0.0;
    let has_host = table.rows.iter().any(copies);
    let mut header = vec!["  strategy".to_string()];
    header.extend(["params", "grads", "optimizer", "activations", "buffers", "foreign"].map(String::from));
    header.push("total".into());
    header.extend(has_host.then(|| "host".into()));
    header.extend(has_comm.then(|| "sent".into()));
    header.extend(["step", "tokens/s", "fits"].map(String::from));
    let row_cells = |row: &StrategyRow| {
        let mark = if row.is_chosen { "*" } else { " " };
        let mut cells = vec![format!("{mark} {}", row.strategy)];
        cells.extend(row.memory.rows().map(|(_, bytes)| bytes_text(bytes)));
        cells.push(row.memory.total().to_string());
        cells.extend(has_host.then(|| bytes_text(row.host)));
        cells.extend(has_comm.then(|| row.prediction.sent.to_string()));
        cells.push(seconds_text(row.prediction.step_seconds));
        cells.push(count_text(row.prediction.tokens_per_s));
        cells.push(if row.fits { "yes" } else { "no" }.into());
        cells
    };
    let rows: Vec<Vec<String>> = [header].into_iter().chain(table.rows.iter().map(row_cells)).collect();
    let mut text = format!("{}\n* {}: {}\n", columns(&rows), table.choice.strategy, table.choice.reason);
    if let (Some(chosen), Some(next)) = (table.rows.iter().find(|row| row.is_chosen), &table.next) {
        let line = |title: &str, choices: &RunChoices| {
            vec![format!("  {title}{choices}"), seconds_text(choices.step_seconds)]
        };
        text.push_str(&columns(&[line("chosen:    ", &chosen.choices), line("next best: ", next)]));
    }
    text
}

impl std::fmt::Display for RunChoices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let RunChoices { strategy, rows, num_micro_batches, recompute, layers, units_on_device, .. } = self;
        let plural = |n: u32| if n == 1 { "" } else { "s" };
        write!(f, "{strategy}, {rows} row{} in ", plural(*rows))?;
        write!(
            f,
            "{num_micro_batches} micro-batch{}, recompute ",
            if *num_micro_batches == 1 { "" } else { "es" }
        )?;
        let RecomputePolicy { early, late, late_blocks } = *recompute;
        let name = |recompute: Recompute| format!("{recompute:?}").to_lowercase();
        match layers.saturating_sub(late_blocks) {
            _ if late_blocks == 0 || early == late => write!(f, "{}", name(early))?,
            0 => write!(f, "{}", name(late))?,
            first => write!(f, "{} in the first {first} blocks, {} in the others", name(early), name(late))?,
        }
        match units_on_device {
            Some((units, all)) => write!(f, ", optimizer states of {units} of {all} units on the device"),
            None => Ok(()),
        }
    }
}

fn bytes_text(bytes: Bytes) -> String {
    if bytes == Bytes::ZERO { "-".into() } else { bytes.to_string() }
}

/// A refusal: what is missing, and the changes that make it fit.
pub fn refusal_text(refusal: &Refusal) -> String {
    format!("{}\n{}", sentence(&refusal.to_string()), changes_text(refusal))
}

fn sentence(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().map(|first| first.to_ascii_uppercase());
    first.into_iter().chain(chars).chain(['.']).collect()
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Refusal { needed, budget, .. } = *self;
        match needed > budget {
            true => {
                let over = needed - budget;
                write!(f, "the plan needs {needed} on the device, {over} over the budget of {budget}")
            }
            false => write!(f, "the plan needs {needed} on the device, and more host memory than there is"),
        }
    }
}

/// The changes that make a refused run fit, with their memory and time.
pub fn changes_text(refusal: &Refusal) -> String {
    let mut out = String::new();
    if refusal.suggestions.is_empty() {
        out.push_str("No change of batch, recomputation, precision, strategy or offload makes it fit: ");
        out.push_str("use more or larger GPUs, or lower max_length.\n");
        return out;
    }
    out.push_str("Changes that make it fit and lose the least time:\n\n");
    let mut rows = vec![["", "device", "host", "step", "time"].map(String::from).to_vec()];
    for (i, suggestion) in refusal.suggestions.iter().enumerate() {
        let changes: Vec<String> = suggestion.changes.iter().map(ToString::to_string).collect();
        rows.push(vec![
            format!("{}. {}", i + 1, changes.join(", ")),
            suggestion.device.to_string(),
            suggestion.host.to_string(),
            seconds_text(suggestion.step_seconds),
            time_lost_text(suggestion, refusal),
        ]);
    }
    out.push_str(&columns(&rows));
    let offloads = |change: &Change| matches!(change, Change::OffloadOptimizer(_));
    if refusal.suggestions.iter().any(|suggestion| suggestion.changes.iter().any(offloads)) {
        let gib = (refusal.budget.0 as f64 / (1u64 << 30) as f64 * 10.0).floor() / 10.0;
        let _ = writeln!(
            out,
            "\nSet memory_budget_gib: {gib} with offload_optimizer, so that it offloads no more than it must."
        );
    }
    let _ = writeln!(
        out,
        "\nTimes are predictions; `time` compares with the refused plan, {} a step if its memory were there.",
        seconds_text(refusal.step_seconds)
    );
    out
}

fn time_lost_text(suggestion: &Suggestion, refusal: &Refusal) -> String {
    match suggestion.time_lost(refusal) {
        lost if lost.abs() < 0.005 => "the same".into(),
        lost if lost < 0.0 => format!("{} shorter", percent_text(-lost)),
        lost => format!("{} longer", percent_text(lost)),
    }
}

impl std::fmt::Display for Change {
    /// The keys to set.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tier = |tier: MemoryTier| match tier {
            MemoryTier::Device => "none",
            MemoryTier::Host => "cpu",
            MemoryTier::Nvme => "nvme",
        };
        match *self {
            Change::MicroBatch { rows, num_micro_batches } => write!(
                f,
                "per_device_train_batch_size: {rows}, gradient_accumulation_steps: {num_micro_batches}"
            ),
            Change::Recompute(RecomputePolicy { early, late, late_blocks }) => {
                let is_uniform = late_blocks == 0 || early == late;
                f.write_str(match early {
                    _ if !is_uniform => "recompute: auto",
                    Recompute::None => "recompute: none",
                    Recompute::Selective => "recompute: selective",
                    Recompute::Full => "recompute: full",
                })
            }
            Change::Bf16 => f.write_str("mixed_precision: bf16"),
            Change::Strategy(name) => write!(f, "strategy: {name}"),
            Change::OffloadOptimizer(to) => write!(f, "offload_optimizer: {}", tier(to)),
            Change::OffloadParams(to) => write!(f, "offload_param: {}", tier(to)),
        }
    }
}

/// The scaling table, and where communication takes over.
pub fn scaling_text(table: &ScalingTable) -> String {
    let names = [
        "GPUs",
        "nodes",
        "strategy",
        "device",
        "fits",
        "step",
        "waits for comm",
        "tokens/s",
        "MFU",
        "efficiency",
    ];
    let row_cells = |row: &ScalingRow| {
        vec![
            row.ranks.to_string(),
            row.nodes.to_string(),
            row.strategy.to_string(),
            row.device.to_string(),
            if row.fits { "yes" } else { "no" }.into(),
            seconds_text(row.step_seconds),
            percent_text(row.exposed_comm_seconds / row.step_seconds),
            count_text(row.tokens_per_s),
            percent_text(row.mfu),
            percent_text(row.efficiency),
        ]
    };
    let rows: Vec<Vec<String>> =
        [names.map(String::from).to_vec()].into_iter().chain(table.rows.iter().map(row_cells)).collect();
    let mut out = columns(&rows);
    let most = table.rows.iter().map(|row| row.exposed_comm_seconds / row.step_seconds).fold(0.0, f64::max);
    let _ = match table.takes_over {
        Some(ranks) => {
            writeln!(
                out,
                "\nCommunication takes over at {ranks} GPUs: from there, over half of a step waits for it."
            )
        }
        None => writeln!(
            out,
            "\nCommunication does not take over: at most {} of a step waits for it.",
            percent_text(most)
        ),
    };
    out
}
