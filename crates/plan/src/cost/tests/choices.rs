//! Which strategy `auto` chooses, which changes a refusal suggests, and how runs scale.

use lockstep_config::StrategyName;
use lockstep_core::{Bytes, DType};
use lockstep_shape::Recompute;
use proptest::prelude::*;

use crate::cost::{
    Change, Chip, Machine, NetworkSpeed, PaperCluster, Workload, choose_strategy, explain_oom, refusal_json,
    refusal_text, scaling_json, scaling_table, scaling_text, strategies_json, strategies_text,
    strategy_table, suggest_changes,
};
use crate::{AccumulationOrder, MemoryTier, PlanError, build};

use super::{machine, single, workload};

fn assert_text(name: &str, text: String) {
    insta::with_settings!({ snapshot_path => "../../snapshots", prepend_module_to_snapshot => false, omit_expression => true }, {
        insta::assert_snapshot!(name, text);
    });
}

#[test]
fn auto_replicates_a_small_model() {
    let machine = machine("a100-80g", 1, 8, "100Gbps");
    let choice = choose_strategy(&workload("90m", 8, 2048), &machine);
    assert_eq!((choice.strategy, choice.fits), (StrategyName::Ddp, true), "{}", choice.reason);
}

#[test]
fn auto_shards_what_does_not_fit() {
    let machine = machine("l40s", 1, 8, "100Gbps");
    let table = strategy_table(&workload("7b", 2, 2048), &machine);
    assert!(table.choice.fits, "{}", table.choice.reason);
    let chosen = table.chosen();
    assert!(chosen.memory.total() <= machine.budget);
    let ddp = &table.rows[0];
    assert!(ddp.strategy == StrategyName::Ddp && !ddp.fits);
    for row in table.rows.iter().filter(|row| row.fits) {
        assert!(chosen.prediction.step_seconds <= 1.05 * row.prediction.step_seconds, "{}", row.strategy);
    }
    assert_text("strategy_table", strategies_text(&table));
    let json = strategies_json(&table);
    assert_eq!(json["chosen"], chosen.strategy.to_string());
    assert_eq!(json["strategies"].as_array().unwrap().len(), 5, "hybrid_shard needs two nodes");
}

/// `per_device_train_batch_size: auto`: rows and recomputation are chosen together, and no divisor of the rows is faster.
#[test]
fn rows_are_chosen_with_recomputation() {
    let machine = single("h200");
    let open = Workload {
        auto_rows: true,
        auto_recompute: true,
        strategy: StrategyName::Ddp,
        ..workload("7b", 16, 2048)
    };
    let table = strategy_table(&open, &machine);
    let chosen = &table.chosen().choices;
    assert!(table.choice.fits && chosen.rows < 16, "{chosen}");
    assert_eq!(chosen.rows * chosen.num_micro_batches, 16);
    for rows in [1, 2, 4, 8, 16] {
        let fixed = Workload { auto_rows: false, ..open.with_rows(rows) };
        let row = strategy_table(&fixed, &machine).chosen().clone();
        assert!(!row.fits || row.prediction.step_seconds >= 0.998 * chosen.step_seconds, "{rows}: {chosen}");
    }
    let next = table.next.as_ref().unwrap();
    assert!(next.step_seconds >= 0.999 * chosen.step_seconds && next != chosen, "{next}");
    assert_text("rows_chosen_with_recomputation", strategies_text(&table));
}

/// Fewer rows are not tried where all of them fit and nothing is spent to save memory.
#[test]
fn all_rows_fit() {
    let open = Workload { auto_rows: true, auto_recompute: true, ..workload("90m", 8, 2048) };
    let table = strategy_table(&open, &single("h200"));
    assert_eq!((table.chosen().choices.rows, table.chosen().choices.num_micro_batches), (8, 1));
}

/// If nothing fits, the fewest rows need the least memory.
#[test]
fn too_few_rows_to_fit() {
    let machine = Machine { budget: Bytes(8 << 30), ..single("h200") };
    let open = Workload { auto_rows: true, strategy: StrategyName::Ddp, ..workload("1b", 4, 2048) };
    let table = strategy_table(&open, &machine);
    assert_eq!((table.choice.fits, table.chosen().choices.rows), (false, 1));
}

#[test]
fn auto_without_room_names_the_smallest() {
    let machine = Machine { budget: Bytes(1 << 30), ..machine("a10", 1, 2, "100Gbps") };
    let choice = choose_strategy(&workload("1b", 1, 1024), &machine);
    assert_eq!((choice.strategy, choice.fits), (StrategyName::Zero3, false), "{}", choice.reason);
}

#[test]
fn a_configured_strategy_stays() {
    let machine = machine("l40s", 1, 8, "100Gbps");
    let ddp = Workload { strategy: StrategyName::NoShard, ..workload("7b", 2, 2048) };
    let table = strategy_table(&ddp, &machine);
    assert_eq!((table.chosen().strategy, table.choice.fits), (StrategyName::Ddp, false));
    assert!(table.choice.reason.contains("does not fit"), "{}", table.choice.reason);
    let one = strategy_table(&workload("90m", 1, 1024), &single("h200"));
    assert_eq!(one.rows.len(), 1, "on one rank all strategies are ddp");
    let with_params = workload("90m", 1, 1024).with_params_in(MemoryTier::Host);
    let table = strategy_table(&with_params, &machine);
    let sharded = [StrategyName::ShardGradOp, StrategyName::Zero3];
    assert!(table.rows.iter().all(|row| sharded.contains(&row.strategy)), "offloaded parameters are sharded");
}

#[test]
fn hybrid_shard_is_compared_on_several_nodes() {
    let machine = machine("h100-80g", 4, 8, "100Gbps");
    let table = strategy_table(&workload("7b", 4, 2048), &machine);
    let row = |name| table.rows.iter().find(|row| row.strategy == name).unwrap();
    let (hybrid, zero3) = (row(StrategyName::HybridShard), row(StrategyName::Zero3));
    assert!(hybrid.prediction.step_seconds < zero3.prediction.step_seconds, "gathers stay inside a node");
    assert!(hybrid.memory.total() > zero3.memory.total());
}

/// `recompute: auto` recomputes less where a strategy leaves more room.
#[test]
fn every_strategy_gets_its_own_recomputation() {
    let machine = machine("l40s", 1, 8, "100Gbps");
    let auto = Workload { auto_recompute: true, ..workload("7b", 4, 2048) };
    let table = strategy_table(&auto, &machine);
    assert!(table.choice.fits);
    let fixed = strategy_table(&workload("7b", 4, 2048).with_recompute(Recompute::Full.into()), &machine);
    let best = |table: &crate::cost::StrategyTable| table.chosen().prediction.step_seconds;
    assert!(best(&table) < best(&fixed));
}

/// Applies a suggestion as a user would.
fn apply<'a>(workload: &Workload<'a>, changes: &[Change], machine: &Machine) -> Workload<'a> {
    let mut changed = workload.with_strategy(workload.strategy, &machine.cluster).unwrap();
    for change in changes {
        changed = match *change {
            Change::MicroBatch { rows, .. } => changed.with_rows(rows),
            Change::Recompute(policy) => changed.with_recompute(policy),
            Change::Bf16 => changed.with_storage(DType::BF16),
            Change::Strategy(name) => changed.with_strategy(name, &machine.cluster).unwrap(),
            Change::OffloadOptimizer(tier) => changed.with_optimizer_in(tier),
            Change::OffloadParams(tier) => changed.with_params_in(tier),
        };
    }
    changed
}

fn assert_suggestions_fit(workload: &Workload<'_>, machine: &Machine) -> crate::cost::Refusal {
    let refusal = suggest_changes(workload, machine).expect("it does not fit");
    assert!(refusal.suggestions.len() <= 3);
    for suggestion in &refusal.suggestions {
        let changed = apply(workload, &suggestion.changes, machine);
        let plan = changed.lay_out(machine);
        assert_eq!(plan.device_bytes(), suggestion.device);
        assert!(suggestion.device <= machine.budget, "{:?}", suggestion.changes);
        let checked: Result<_, PlanError> = build(plan.input.clone(), plan.rank);
        assert_eq!(checked.expect("a valid plan").device_bytes(), suggestion.device);
    }
    refusal
}

#[test]
fn three_changes_make_a_run_fit() {
    let machine = machine("l40s", 1, 8, "100Gbps");
    let ddp = Workload { strategy: StrategyName::Ddp, ..workload("7b", 4, 2048) };
    let refusal = assert_suggestions_fit(&ddp, &machine);
    assert_eq!(refusal.suggestions.len(), 3);
    assert_text("refusal_7b_on_l40s", refusal_text(&refusal));
    assert_eq!(refusal_json(&refusal)["suggestions"].as_array().unwrap().len(), 3);
}

#[test]
fn small_overruns_need_one_change() {
    let base = Workload { strategy: StrategyName::Ddp, ..workload("300m", 16, 2048) };
    let whole = base.lay_out(&single("h200"));
    let machine = Machine { budget: whole.device_bytes() - Bytes(1 << 20), ..single("h200") };
    let refusal = assert_suggestions_fit(&base, &machine);
    assert_eq!(refusal.suggestions.len(), 3);
    assert!(refusal.suggestions.iter().all(|suggestion| suggestion.changes.len() == 1), "{refusal:?}");
    let first = &refusal.suggestions[0];
    assert!(matches!(first.changes[..], [Change::MicroBatch { .. }]), "the ladder begins with the batch");
    assert_text("refusal_300m_over_by_little", refusal_text(&refusal));
}

#[test]
fn what_fits_is_not_refused_and_what_cannot_fit_gets_no_advice() {
    assert_eq!(suggest_changes(&workload("90m", 1, 1024), &single("h200")), None);
    let hopeless = Machine { budget: Bytes(1 << 29), ..single("a10") };
    let refusal = suggest_changes(&workload("7b", 1, 2048), &hopeless).unwrap();
    assert_eq!(refusal.suggestions, []);
    assert!(refusal_text(&refusal).contains("use more or larger GPUs"));
}

#[test]
fn host_memory_limits_offload() {
    let mut base = Workload { strategy: StrategyName::Ddp, ..workload("7b", 1, 2048) };
    base.order = Some(AccumulationOrder::Local);
    let offloads = |machine: &Machine| {
        let refusal = suggest_changes(&base, machine).unwrap();
        let to_host = |change: &Change| *change == Change::OffloadOptimizer(MemoryTier::Host);
        refusal.suggestions.iter().any(|suggestion| suggestion.changes.iter().any(to_host))
    };
    let plenty = machine("l40s", 1, 1, "100Gbps");
    assert!(offloads(&plenty));
    assert!(!offloads(&Machine { host_budget: Some(Bytes(8 << 30)), ..plenty }));
}

#[test]
fn out_of_memory_messages_are_read() {
    let gib = |x: f64| Some(Bytes((x * (1u64 << 30) as f64) as u64));
    let new = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 26.01 GiB.\nGPU 0 has a total capacity \
               of 44.43 GiB of which 18.00 GiB is free. Including non-PyTorch memory, this process has 26.42 GiB \
               memory in use. Of the allocated memory 25.10 GiB is allocated by PyTorch, and 1.00 GiB is reserved \
               by PyTorch but unallocated.";
    let report = explain_oom(new).unwrap();
    assert_eq!((report.tried, report.capacity, report.free), (gib(26.01), gib(44.43), gib(18.0)));
    assert_eq!((report.in_use, report.fragmented, report.gpu), (gib(26.42), gib(1.0), Some(0)));
    let old = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 3; 39.59 GiB total capacity; 36.10 \
               GiB already allocated; 1.25 GiB free; 37.00 GiB reserved in total by PyTorch)";
    let report = explain_oom(old).unwrap();
    assert_eq!((report.tried, report.capacity, report.free), (gib(2.0), gib(39.59), gib(1.25)));
    assert_eq!((report.in_use, report.gpu), (gib(36.1), Some(3)));
    // Lockstep's own message, as it is printed today.
    let refused =
        PlanError::OverBudget { needed: Bytes(50 << 30), over: Bytes(6 << 30), budget: Bytes(44 << 30) };
    let report = explain_oom(&format!("error: {refused}\nhint: …")).unwrap();
    assert_eq!((report.needed, report.usable()), (gib(50.0), gib(44.0)));
    assert!(report.is_refusal);
    for garbage in [
        "",
        "out of memory",
        "Tried to allocate GiB",
        "the plan needs x y",
        "out of memory 🦀 Tried to allocate 1 🦀",
    ] {
        assert_eq!(explain_oom(garbage), None, "{garbage}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Pasted text of any kind is read or refused.
    #[test]
    fn any_text_is_safe_to_read(words in prop::collection::vec(0..12usize, 0..12), other in "\\PC{0,20}") {
        const WORDS: [&str; 11] = [
            "out of memory", "Tried to allocate ", "26.01 GiB", "GPU ", "total capacity of ", "is free",
            "the plan needs ", "over the budget of ", "Gbps", "1e999", "/gpu",
        ];
        let text: String = words.iter().map(|i| WORDS.get(*i).copied().unwrap_or(&other)).collect();
        if let Some(report) = explain_oom(&text) {
            prop_assert!(report.tried.is_some() || report.needed.is_some());
        }
        if let Ok(speed) = NetworkSpeed::parse(&text) {
            prop_assert!(speed.bytes_per_s > 0.0 && speed.bytes_per_s.is_finite());
        }
    }
}

/// If `auto` finds no strategy that fits, the changes start from the smallest one.
#[test]
fn auto_is_refused_with_changes_too() {
    let machine = Machine { budget: Bytes(30 << 30), ..machine("l40s", 1, 8, "100Gbps") };
    let run = workload("7b", 4, 2048);
    let choice = choose_strategy(&run, &machine);
    assert!(!choice.fits);
    let refusal = suggest_changes(&run, &machine).unwrap();
    assert!(!refusal.suggestions.is_empty() && refusal.needed > machine.budget);
    let smallest = Workload { strategy: choice.strategy, ..run };
    assert_eq!(assert_suggestions_fit(&smallest, &machine), refusal);
}

#[test]
fn networks_and_chips_are_read() {
    let speed = |text: &str| NetworkSpeed::parse(text).map(|speed| (speed.per_node(8), speed.per_gpu));
    assert_eq!(speed("400Gbps"), Ok((50e9, false)));
    assert_eq!(speed("400gbps/gpu"), Ok((400e9, true)));
    assert_eq!(speed("25 GB/s/node"), Ok((25e9, false)));
    assert_eq!(speed("12.5GB/s"), Ok((12.5e9, false)));
    for bad in ["", "fast", "400", "0Gbps", "-1Gbps", "400Gbps/rack", "..Gbps", "1e9Gbps"] {
        assert!(NetworkSpeed::parse(bad).is_err(), "{bad}");
    }
    assert_eq!(Chip::named("H100-80G").unwrap().name, "h100-80g");
    let error = Chip::named("h100-80gb").unwrap_err();
    assert!(error.closest == Some("h100-80g") && error.hint().contains("l40s"));
    let closest = |name| Chip::named(name).unwrap_err().closest;
    assert_eq!(
        [closest("h100"), closest("A100"), closest("h20")],
        [Some("h100-80g"), Some("a100-80g"), Some("h200")]
    );
    assert_eq!([closest("l4s"), closest(""), closest("tpu-v5")], [Some("l40s"), None, None]);
    assert!(PaperCluster::parse(12, "a10", "10Gbps", None).is_err(), "12 GPUs do not fill nodes of 8");
    let cluster = PaperCluster::parse(1024, "h100-80g", "400Gbps", None).unwrap();
    assert_eq!(
        cluster.to_string(),
        "128 nodes of 8 h100-80g (vendor data sheet), network 400 Gbit/s per node"
    );
}

#[test]
fn a_thousand_gpus_on_paper() {
    let cluster = PaperCluster::parse(1024, "h100-80g", "400Gbps", None).unwrap();
    let run = Workload { strategy: StrategyName::Zero3, ..workload("7b", 4, 2048) };
    let table = scaling_table(&run, &cluster.machine(DType::BF16, None));
    let ranks: Vec<u32> = table.rows.iter().map(|row| row.ranks).collect();
    assert_eq!(ranks, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]);
    for pair in table.rows.windows(2) {
        assert!(pair[1].tokens_per_s > 0.0 && pair[1].device <= pair[0].device, "shards become smaller");
    }
    let over = table.takes_over.expect("50 GB/s per node are too few for eight H100");
    let row = table.rows.iter().find(|row| row.ranks == over).unwrap();
    assert!(row.exposed_comm_seconds > row.step_seconds / 2.0);
    assert_eq!(scaling_json(&table)["communication_takes_over_at_gpus"], over);
    assert_text("scaling_1024_h100", scaling_text(&table));
}

#[test]
fn a_fast_network_scales_better() {
    let efficiency = |network: &str| {
        let cluster = PaperCluster::parse(64, "h100-80g", network, None).unwrap();
        let zero3 = Workload { strategy: StrategyName::Zero3, ..workload("7b", 4, 2048) };
        let table = scaling_table(&zero3, &cluster.machine(DType::BF16, None));
        table.rows.last().unwrap().efficiency
    };
    assert!(efficiency("400Gbps/gpu") > efficiency("100Gbps"));
}

#[test]
fn a_workload_has_what_its_configuration_leaves_open() {
    let of = |settings: &[&str]| {
        let settings: Vec<String> = settings.iter().map(ToString::to_string).collect();
        let config = lockstep_config::load(None, &settings).expect("a valid configuration");
        Workload::of(&config, workload("tiny", 1, 256).input, &super::workspace)
    };
    let base = ["model=tiny", "dataset_name=x.jsonl", "nproc_per_node=2"];
    let plain = of(&base);
    assert_eq!((plain.strategy, plain.order), (StrategyName::Ddp, None));
    assert!(!plain.auto_recompute && !plain.auto_offload);
    let more = ["strategy=auto", "recompute=auto", "memory_budget_gib=8", "per_device_train_batch_size=6"];
    let open = of(&[&base[..], &more[..], &["accumulation_order=reduced"]].concat());
    assert_eq!((open.strategy, open.rows), (StrategyName::Auto, 6));
    assert_eq!(open.order, Some(AccumulationOrder::Reduced));
    assert!(open.auto_recompute && open.auto_offload);
}

/// With states on the host, recomputation makes room for more of them on the device, and that can save time.
#[test]
fn recomputation_and_offload_are_one_choice() {
    let machine = Machine { budget: Bytes(44 << 30), ..single("h200") };
    let offloaded = workload("7b", 4, 2048).with_optimizer_in(MemoryTier::Host);
    let tokens_per_s = |workload: &Workload<'_>| {
        let plan = workload.lay_out(&machine);
        assert!(machine.fits(&plan));
        machine.predict(&plan).tokens_per_s
    };
    let full = tokens_per_s(&offloaded.with_recompute(Recompute::Full.into()));
    let auto = tokens_per_s(&Workload { auto_recompute: true, ..offloaded.clone() });
    let least = offloaded.input.clone().with_least_recompute(machine.budget);
    let least = tokens_per_s(&Workload { input: least, ..offloaded });
    assert!(auto >= full && full > least, "auto {auto}, full {full}, least {least}");
}
