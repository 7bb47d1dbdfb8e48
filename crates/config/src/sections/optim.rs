//! The optimizer and the learning-rate schedule.

use lockstep_core::DType;

use crate::reader::{Later, Reader};
use crate::sections::schedule::{LrSchedulerType, ScheduleSettings};

/// The optimizer, its hyperparameters and the learning-rate schedule.
#[derive(Clone, Debug, PartialEq)]
pub struct OptimConfig {
    pub optimizer: OptimizerName,
    /// The type of its states.
    pub state_dtype: StateDtype,
    /// Whether bf16 training has f32 master weights. Without them, updates round the weights stochastically.
    pub master_weights: bool,
    /// The type of gradients between their reduction and the update: f32 or bf16.
    pub gradient_dtype: DType,
    /// SGD only.
    pub momentum: f64,
    /// SGD only.
    pub nesterov: bool,
    /// Name patterns of tensors that are not trained.
    pub freeze: Vec<String>,
    pub learning_rate: f64,
    pub lr_scaling: LrScaling,
    pub adam_beta1: f64,
    pub adam_beta2: f64,
    pub adam_epsilon: f64,
    pub weight_decay: f64,
    /// Whether weight decay also applies to norm weights and biases.
    pub decay_norms_and_biases: bool,
    /// `None`: gradients are not clipped.
    pub max_grad_norm: Option<f64>,
    pub lr_scheduler_type: LrSchedulerType,
    pub warmup: Warmup,
}

/// How optimizer states are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateDtype {
    F32,
    /// With stochastic rounding.
    Bf16,
    /// 8-bit codes with a scale for every block of 256 elements.
    Int8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptimizerName {
    AdamW,
    Sgd,
    Lion,
}

/// How the learning rate is scaled with the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LrScaling {
    None,
    Linear,
    Sqrt,
}

impl LrScaling {
    /// The factor of the learning rate for `world` ranks.
    pub fn factor(self, world: u32) -> f64 {
        match self {
            LrScaling::None => 1.0,
            LrScaling::Linear => world.into(),
            LrScaling::Sqrt => f64::from(world).sqrt(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Warmup {
    Steps(u64),
    /// A fraction of all steps, in (0, 1).
    Ratio(f64),
}

const GRADIENTS: [(&str, DType); 4] =
    [("fp32", DType::F32), ("float32", DType::F32), ("bf16", DType::BF16), ("bfloat16", DType::BF16)];

/// DeepSpeed's default.
const DEEPSPEED_WARMUP: Warmup = Warmup::Steps(1000);

const OTHER_OPTIMIZERS: Later = Later(
    &[
        "adam",
        "adafactor",
        "adagrad",
        "rmsprop",
        "lamb",
        "muon",
        "adamw_torch_8bit",
        "adamw_torch_4bit",
        "adamw_anyprecision",
        "ademamix",
        "galore_adamw",
        "paged_adamw",
        "paged_adamw_8bit",
        "paged_adamw_32bit",
        "stable_adamw",
        "schedule_free_adamw",
        "grokadamw",
        "apollo_adamw",
        "onebitadam",
    ],
    "use `optim: adamw`, `adamw_8bit`, `sgd` or `lion`.",
);

impl OptimConfig {
    pub(crate) fn read(r: &mut Reader<'_>) -> Self {
        // Implementations of the same full-precision arithmetic.
        let adamw =
            ["adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "fused_adam"];
        use StateDtype::{F32, Int8};
        let others = [
            ("sgd", (OptimizerName::Sgd, F32)),
            ("lion", (OptimizerName::Lion, F32)),
            ("lion_32bit", (OptimizerName::Lion, F32)),
            ("adamw_8bit", (OptimizerName::AdamW, Int8)),
            ("adamw_bnb_8bit", (OptimizerName::AdamW, Int8)),
            ("lion_8bit", (OptimizerName::Lion, Int8)),
        ];
        let names: Vec<_> =
            adamw.map(|name| (name, (OptimizerName::AdamW, F32))).into_iter().chain(others).collect();
        let named = r.word("optim", &names, OTHER_OPTIMIZERS);
        let (optimizer, state_dtype) = named.unwrap_or((OptimizerName::AdamW, F32));
        let state_dtype = read_state_dtype(r, state_dtype);
        let below_one = "at least 0 and below 1";
        let is_below_one = |x: f64| (0.0..1.0).contains(&x);
        let scalings = [("none", LrScaling::None), ("linear", LrScaling::Linear), ("sqrt", LrScaling::Sqrt)];
        let scaling_off = ["no", "off", "false"].map(|word| (word, LrScaling::None));
        let masters = [("fp32", true), ("float32", true), ("none", false)];
        let (lr_scheduler_type, warmup) = read_schedule(r);
        let (momentum, nesterov) = read_momentum(r, optimizer);
        OptimConfig {
            optimizer,
            state_dtype,
            master_weights: r.word("master_weights", &masters, Later::NONE).unwrap_or(true),
            gradient_dtype: r.word("gradient_dtype", &GRADIENTS, Later::NONE).unwrap_or(DType::F32),
            momentum,
            nesterov,
            freeze: r.list("freeze", "a list of patterns such as `model.layers.0` or `*mlp*`"),
            learning_rate: r
                .float("learning_rate", "a finite number, at least 0", |x| x >= 0.0)
                .unwrap_or(0.0),
            lr_scaling: r
                .node("lr_scaling")
                .and_then(|node| {
                    let off = node.bool() == Some(false);
                    let shown = if off { &scaling_off[..] } else { &scalings[..] };
                    r.word_of("lr_scaling", shown, Later::NONE, &node)
                })
                .unwrap_or(LrScaling::None),
            adam_beta1: r.float("adam_beta1", below_one, is_below_one).unwrap_or(0.0),
            adam_beta2: r.float("adam_beta2", below_one, is_below_one).unwrap_or(0.0),
            adam_epsilon: r.float("adam_epsilon", "above 0", |x| x > 0.0).unwrap_or(1.0),
            weight_decay: r.float("weight_decay", "a finite number, at least 0", |x| x >= 0.0).unwrap_or(0.0),
            decay_norms_and_biases: r.bool("decay_norms_and_biases").unwrap_or(false),
            max_grad_norm: r
                .float("max_grad_norm", "above 0, or 0 to turn clipping off", |x| x >= 0.0)
                .filter(|norm| *norm > 0.0),
            lr_scheduler_type,
            warmup,
        }
    }
}

/// Reads `optimizer_state_dtype`, which must not contradict the optimizer's name.
fn read_state_dtype(r: &mut Reader<'_>, of_name: StateDtype) -> StateDtype {
    let words = [
        ("fp32", StateDtype::F32),
        ("float32", StateDtype::F32),
        ("bf16", StateDtype::Bf16),
        ("bfloat16", StateDtype::Bf16),
        ("int8", StateDtype::Int8),
    ];
    let (given, optim) = (r.given("optimizer_state_dtype"), r.given("optim"));
    let Some(dtype) = r.word("optimizer_state_dtype", &words, Later::NONE) else { return of_name };
    if let (true, Some(given), Some(optim)) =
        (of_name == StateDtype::Int8 && dtype != StateDtype::Int8, given, optim)
    {
        r.conflict(&optim, &given, "an 8-bit optimizer has states of type `int8`; keep one.");
    }
    dtype
}

/// Reads `momentum` and `nesterov`, which only SGD uses.
fn read_momentum(r: &mut Reader<'_>, optimizer: OptimizerName) -> (f64, bool) {
    let given = [r.given("momentum"), r.given("nesterov")];
    let momentum = r.float("momentum", "at least 0 and below 1", |x| (0.0..1.0).contains(&x)).unwrap_or(0.0);
    let nesterov = r.bool("nesterov").unwrap_or(false);
    if optimizer != OptimizerName::Sgd {
        for given in given.iter().flatten() {
            r.note(format!("`{}` has no effect: only `optim: sgd` uses it", given.spelled));
        }
        return (0.0, false);
    }
    if let (true, Some(given)) = (nesterov && momentum == 0.0, &given[1]) {
        r.out_of_range("nesterov", "false unless `momentum` is above 0", &given.node);
    }
    (momentum, nesterov)
}

fn read_schedule(r: &mut Reader<'_>) -> (LrSchedulerType, Warmup) {
    let ScheduleSettings { scheduler, warmup_num_steps, has_auto_warmup } = LrSchedulerType::read(r);
    let given = r.given("warmup_steps").or(r.given("warmup_ratio"));
    let warmup = match (read_warmup(r), warmup_num_steps) {
        (warmup, Some(steps)) => {
            // The scheduler's own count takes precedence; a different `warmup_steps` contradicts it.
            if let (Some(given), true) = (&given, warmup != Warmup::Steps(steps)) {
                let rule = format!("equal to the scheduler's `warmup_num_steps`, {steps}");
                let hint = "remove one of the two, or write `warmup_num_steps: auto`.";
                r.out_of_range_with(&given.spelled, rule, hint, &given.node);
            }
            Warmup::Steps(steps)
        }
        (_, None) if scheduler.is_deepspeed() && given.is_none() && !has_auto_warmup => DEEPSPEED_WARMUP,
        (warmup, None) => warmup,
    };
    if let (LrSchedulerType::Constant, Some(given)) = (scheduler, given)
        && warmup != Warmup::Steps(0)
    {
        r.note(format!(
            "`{}` has no effect: `constant` has no warmup; use `constant_with_warmup`",
            given.spelled
        ));
    }
    (scheduler, warmup)
}

fn read_warmup(r: &mut Reader<'_>) -> Warmup {
    r.prefer_flags(&["warmup_steps", "warmup_ratio"]);
    let (steps_given, ratio_given) = (r.given("warmup_steps"), r.given("warmup_ratio"));
    let steps = read_warmup_steps(r);
    let ratio = r.float("warmup_ratio", "at least 0 and below 1", |x| (0.0..1.0).contains(&x));
    let (Some(ratio), Some(by_ratio)) = (ratio.filter(|x| *x > 0.0), ratio_given) else { return steps };
    match (steps_given, steps) {
        // As in Hugging Face's Trainer, `warmup_steps: 0` does not override the ratio.
        (None, _) | (_, Warmup::Steps(0)) => {}
        (_, Warmup::Ratio(same)) if same == ratio => {}
        (Some(by_steps), _) => {
            r.conflict(&by_steps, &by_ratio, "both set the length of the warmup; keep one.");
        }
    }
    r.derived("warmup_steps", "warmup_ratio");
    Warmup::Ratio(ratio)
}

fn read_warmup_steps(r: &mut Reader<'_>) -> Warmup {
    let Some(node) = r.node("warmup_steps") else { return Warmup::Steps(0) };
    match (node.integer().map(u64::try_from), node.float()) {
        (Some(Ok(steps)), _) => return Warmup::Steps(steps),
        (None, Some(ratio)) if ratio > 0.0 && ratio < 1.0 => return Warmup::Ratio(ratio),
        (_, Some(_)) => {
            r.out_of_range(
                "warmup_steps",
                "a whole number of steps, or a fraction of all steps below 1",
                &node,
            );
        }
        (_, None) => r.wrong_type("warmup_steps", "a number", &node),
    }
    Warmup::Steps(0)
}
