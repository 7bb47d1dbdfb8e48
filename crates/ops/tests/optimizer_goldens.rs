//! SGD and Lion against PyTorch, bit for bit. `goldens/optimizers/make.py` describes how the goldens were made.

use std::path::Path;

use lockstep_core::{Bytes, DType};
use lockstep_device::{Isa, Memory, Pool, Queue, View};
use lockstep_ops::optimizer::Params;
use lockstep_ops::{lion, sgd};
use serde_json::Value;

fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../goldens/optimizers/golden.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn read(view: View) -> Vec<f32> {
    let mut out = vec![0f32; view.len()];
    view.read_f32(&mut out).unwrap();
    out
}

/// Runs the cases whose settings have `key`. `update(queue, settings, [parameters, gradients, state])` is one step.
fn check(key: &str, update: impl Fn(&Queue, &Value, [View; 3])) {
    let golden = golden();
    let start = numbers(&golden["start"]);
    let gradients: Vec<Vec<f32>> = golden["gradients"].as_array().unwrap().iter().map(numbers).collect();
    let memory = Memory::allocate(Bytes(1 << 20), &Pool::new(1)).unwrap();
    let views = [0, 1, 2].map(|i| memory.view(i << 16, start.len(), DType::F32));
    let [p, g, state] = views;
    let cases = golden["cases"].as_array().unwrap().iter().filter(|case| !case["settings"][key].is_null());
    let mut count = 0;
    for case in cases {
        for isa in Isa::all() {
            let queue = Queue::cpu_with(1, isa);
            p.write_f32(&start).unwrap();
            state.write_f32(&vec![0.0; start.len()]).unwrap();
            for (step, gradient) in gradients.iter().enumerate() {
                g.write_f32(gradient).unwrap();
                update(&queue, &case["settings"], views);
                let want = numbers(&case["steps"][step]);
                assert_eq!(bits(&read(p)), bits(&want), "{}, step {step}, {isa}", case["name"]);
            }
            if !case["state"].is_null() {
                assert_eq!(bits(&read(state)), bits(&numbers(&case["state"])), "{}", case["name"]);
            }
        }
        count += 1;
    }
    assert!(count >= 2, "{count} cases with {key}");
}

fn lr() -> f64 {
    golden()["lr"].as_f64().unwrap()
}

#[test]
fn sgd_has_the_bits_of_torch() {
    let lr = lr() as f32;
    check("momentum", |queue, settings, [master, grad, state]| {
        let factor = |key: &str| settings[key].as_f64().unwrap() as f32;
        let momentum = (factor("momentum") != 0.0).then_some(state.into());
        let params = Params::Master { master, working: None };
        let weight_decay = factor("weight_decay");
        let range = sgd::ParamRange { params, grad, momentum, rounding: None, weight_decay };
        let nesterov = settings["nesterov"].as_bool().unwrap();
        let params = sgd::Hyperparams { lr, momentum: factor("momentum"), nesterov, clip: 1.0 };
        sgd::update(queue, range, &params, None);
    });
}

#[test]
fn lion_has_the_bits_of_its_tensor_form() {
    let lr = lr();
    check("betas", |queue, settings, [master, grad, m]| {
        let [beta1, beta2] = [0, 1].map(|i| settings["betas"][i].as_f64().unwrap());
        let weight_decay = settings["weight_decay"].as_f64().unwrap() as f32;
        let range = lion::ParamRange {
            params: Params::Master { master, working: None },
            grad,
            m: m.into(),
            rounding: None,
            weight_decay,
        };
        lion::update(queue, range, &lion::Hyperparams::new(lr, (beta1, beta2), 1.0), None);
    });
}
