//! The same numbers, whatever the strategy: cases in which every two choices meet, each compared with plain
//! ddp on its mesh. `cargo run --release -p lockstep-engine --example all_worlds` runs every case there is.

use lockstep_testkit::{pairwise_cases, run_case};

#[test]
fn every_two_choices_agree_with_plain_ddp() {
    let mut plain = Vec::new();
    for case in pairwise_cases() {
        let base = case.plain();
        if !plain.iter().any(|(known, _)| *known == base) {
            plain.push((base, run_case(&base)));
        }
        let (_, want) = plain.iter().find(|(known, _)| *known == base).expect("just run");
        let got = run_case(&case);
        assert!(got.norms == want.norms, "{case}: other gradient norms than plain ddp");
        assert!(got.log_probs == want.log_probs, "{case}: other log-probabilities than plain ddp");
        assert!(got.states == want.states, "{case}: other weights or moments than plain ddp");
    }
}
