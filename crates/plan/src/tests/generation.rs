//! The size of the generate phase follows from the memory that is there.

use super::*;
use crate::{ModelId, PlanError, WantedGeneration};

const PAGE: KvPage = KvPage { tokens: 64, elems: 64 * 64 };
const WANTED: WantedGeneration = WantedGeneration { docs: 40, tokens_per_doc: 600, page: PAGE };

fn input() -> PlanInput {
    TestSetup::new("tiny", StrategyName::Ddp, 1, 1).with(|s| s.tokens = 1024).input()
}

/// The memory on the device with these bounds.
fn device_bytes(bounds: GenerationBounds) -> Bytes {
    let mut input = input();
    input.models[0].generation = Some(bounds);
    build(input, Rank(0)).unwrap().device_bytes()
}

#[test]
fn a_budget_decides_the_number_of_pages() {
    let bounds = |budget: Bytes| input().generation_bounds(ModelId::FIRST, WANTED, Some(budget));
    let all = GenerationBounds::of_docs(40, 600, PAGE);
    assert_eq!((all.pages_per_doc(), all.pages), (10, 400));
    let enough = device_bytes(all);
    assert_eq!(bounds(enough), Ok(all));
    assert_eq!(bounds(Bytes(enough.0 * 2)), Ok(all));
    let least = device_bytes(all.with_pages(10, PAGE));
    for percent in [0, 1, 10, 50, 99] {
        let budget = least + Bytes((enough - least).0 * percent / 100);
        let found = bounds(budget).unwrap();
        assert!(device_bytes(found) <= budget);
        let one_more = found.with_pages(found.pages + 1, PAGE);
        assert!(device_bytes(one_more) > budget, "{percent} %: {found:?}");
        assert_eq!(found.docs, found.pages.min(40));
    }
    assert!(matches!(bounds(least - Bytes(1)), Err(PlanError::OverBudget { .. })));
}

#[test]
fn without_a_budget_generation_uses_the_memory_of_training() {
    let without = build(input(), Rank(0)).unwrap().device_bytes();
    let found = input().generation_bounds(ModelId::FIRST, WANTED, None).unwrap();
    assert!(found.pages > 10 && found.pages < 400, "{found:?}");
    let (with, one_more) = (device_bytes(found), device_bytes(found.with_pages(found.pages + 1, PAGE)));
    // The rotary tables are residents, and longer for longer sequences.
    assert!(with.0 <= without.0 + (1 << 20), "{with} and {without}");
    assert!(one_more > with);
    // One sequence is planned even if training needs less.
    let long = WantedGeneration { docs: 3, tokens_per_doc: 100_000, page: PAGE };
    let found = input().generation_bounds(ModelId::FIRST, long, None).unwrap();
    assert_eq!((found.pages, found.docs), (found.pages_per_doc(), 3));
    // The head's chunk and a pass bound the sequences at once.
    let many = WantedGeneration { docs: 5000, tokens_per_doc: 64, page: PAGE };
    let found = input().generation_bounds(ModelId::FIRST, many, Some(Bytes(1 << 30))).unwrap();
    assert_eq!((found.docs, found.pages), (256, 256));
}
