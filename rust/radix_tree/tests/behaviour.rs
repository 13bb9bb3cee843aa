//! What the tree promises, case by case.

use radix_tree::{NamespaceId, NodeId, PageId, PageOutcome, RadixError, RadixTree};

const NAMESPACE: NamespaceId = NamespaceId(7);
const PAGE_SIZE: usize = 16;

fn pages(first: u32, count: u32) -> Vec<PageId> {
    (first..first + count).map(PageId).collect()
}

/// Tokens that no other `stream` has anywhere.
fn tokens(stream: u32, count: u32) -> Vec<u32> {
    (0..count).map(|position| stream * 1_000_000 + position).collect()
}

fn evict(tree: &mut RadixTree, num_pages: usize) -> Vec<PageId> {
    let mut freed = Vec::new();
    tree.evict(num_pages, &mut freed);
    tree.check_integrity().expect("integrity");
    freed
}

#[test]
fn two_prompts_that_share_21_tokens_match_21() {
    let mut tree = RadixTree::new(PAGE_SIZE);
    let first = tokens(1, 40);
    tree.insert(NAMESPACE, &first, &pages(1, 3)).unwrap();
    let second = [&first[..21], &tokens(2, 30)].concat();
    let found = tree.match_prefix(NAMESPACE, &second);
    assert_eq!(found.num_tokens, 21);
    assert_eq!(found.pages, pages(1, 1));
    let donor = found.donor.unwrap();
    assert_eq!((donor.page, donor.num_tokens), (PageId(2), 5));
}

#[test]
fn an_identical_prompt_matches_all_but_the_capped_token() {
    for length in 1..=3 * PAGE_SIZE {
        let mut tree = RadixTree::new(PAGE_SIZE);
        let prompt = tokens(1, length as u32);
        let num_pages = length.div_ceil(PAGE_SIZE) as u32;
        tree.insert(NAMESPACE, &prompt, &pages(1, num_pages)).unwrap();
        let capped = &prompt[..length - 1];
        assert_eq!(tree.peek(NAMESPACE, capped).num_tokens, length - 1);
        assert_eq!(tree.match_prefix(NAMESPACE, capped).num_tokens, length - 1);
        assert_eq!(tree.match_prefix(NAMESPACE, &prompt).num_tokens, length);
    }
}

#[test]
fn locking_a_match_protects_exactly_its_pages() {
    let mut tree = RadixTree::new(PAGE_SIZE);
    let prompt = tokens(1, 10 * PAGE_SIZE as u32);
    tree.insert(NAMESPACE, &prompt, &pages(1, 10)).unwrap();
    let found = tree.match_prefix(NAMESPACE, &prompt[..3 * PAGE_SIZE + 5]);
    tree.lock(found.node).unwrap();
    assert_eq!((tree.num_locked_pages(), tree.num_evictable_pages()), (3, 7));
    let donor = found.donor.unwrap();
    tree.lock(donor.node).unwrap();
    assert_eq!(tree.num_locked_pages(), 4);
    assert_eq!(evict(&mut tree, 100), (5..=10).rev().map(PageId).collect::<Vec<_>>());
    tree.unlock(found.node).unwrap();
    assert_eq!(tree.num_locked_pages(), 4, "the donor's path is still locked");
    tree.unlock(donor.node).unwrap();
    assert_eq!(tree.num_locked_pages(), 0);
}

#[test]
fn a_lock_survives_splits_of_its_node() {
    let mut tree = RadixTree::new(PAGE_SIZE);
    let prompt = tokens(1, 8 * PAGE_SIZE as u32);
    let inserted = tree.insert(NAMESPACE, &prompt, &pages(1, 8)).unwrap();
    tree.lock(inserted.node).unwrap();
    for num_pages in [6, 1, 3] {
        let found = tree.match_prefix(NAMESPACE, &prompt[..num_pages * PAGE_SIZE]);
        assert_ne!(found.node, inserted.node);
        assert_eq!(evict(&mut tree, 100), []);
    }
    tree.unlock(inserted.node).unwrap();
    assert_eq!(tree.unlock(inserted.node), Err(RadixError::NotLocked { node: inserted.node }));
    assert_eq!(evict(&mut tree, 100).len(), 8);
}

#[test]
fn an_id_goes_stale_when_any_page_that_it_stands_for_leaves() {
    let mut tree = RadixTree::new(PAGE_SIZE);
    let prompt = tokens(1, 4 * PAGE_SIZE as u32);
    let whole = tree.insert(NAMESPACE, &prompt, &pages(1, 4)).unwrap().node;
    evict(&mut tree, 1);
    assert_eq!(tree.lock(whole), Err(RadixError::StaleNode { node: whole }));
    let rest = tree.match_prefix(NAMESPACE, &prompt).node;
    tree.lock(rest).unwrap();
    assert_eq!(tree.num_locked_pages(), 3);
}

#[test]
fn a_partial_page_gives_way_to_a_longer_one_unless_it_is_locked() {
    let mut tree = RadixTree::new(PAGE_SIZE);
    let prompt = tokens(1, PAGE_SIZE as u32);
    let short = tree.insert(NAMESPACE, &prompt[..5], &pages(1, 1)).unwrap().node;
    let longer = tree.insert(NAMESPACE, &prompt[..9], &pages(2, 1)).unwrap();
    assert_eq!(longer.freed, pages(1, 1));
    assert_eq!(tree.lock(short), Err(RadixError::StaleNode { node: short }));
    tree.lock(longer.node).unwrap();
    let whole = tree.insert(NAMESPACE, &prompt, &pages(3, 1)).unwrap();
    assert_eq!((whole.freed, tree.num_pages()), (vec![], 2));
    let shorter = tree.insert(NAMESPACE, &prompt[..9], &pages(4, 1)).unwrap();
    assert_eq!(shorter.outcomes, [PageOutcome::Duplicate { tree_page: PageId(2) }]);
    let shorter = tree.insert(NAMESPACE, &prompt[..3], &pages(4, 1)).unwrap();
    assert_eq!(shorter.outcomes, [PageOutcome::Duplicate { tree_page: PageId(2) }]);
    assert_eq!(shorter.node, NodeId::ROOT);
    tree.check_integrity().expect("integrity");
}

#[test]
fn a_page_being_filled_can_be_inserted_again_and_again() {
    let mut tree = RadixTree::new(PAGE_SIZE);
    let prompt = tokens(1, 2 * PAGE_SIZE as u32);
    let node = tree.insert(NAMESPACE, &prompt[..1], &pages(1, 1)).unwrap().node;
    tree.lock(node).unwrap();
    for length in 2..=PAGE_SIZE {
        let grown = tree.insert(NAMESPACE, &prompt[..length], &pages(1, 1)).unwrap();
        assert_eq!(grown.outcomes, [PageOutcome::Adopted]);
        assert_eq!((grown.node, grown.freed), (node, vec![]));
        tree.check_integrity().expect("integrity");
    }
    let below = tree.insert_below(NAMESPACE, node, &prompt[PAGE_SIZE..], &pages(2, 1)).unwrap();
    assert_eq!(tree.match_prefix(NAMESPACE, &prompt).node, below.node);
    tree.unlock(node).unwrap();
    assert_eq!(evict(&mut tree, 2), [PageId(2), PageId(1)]);
}

#[test]
fn a_page_in_the_tree_is_refused_elsewhere() {
    let mut tree = RadixTree::new(PAGE_SIZE);
    tree.insert(NAMESPACE, &tokens(1, 20), &pages(1, 2)).unwrap();
    let refused = tree.insert(NAMESPACE, &tokens(2, 20), &[PageId(3), PageId(2)]);
    assert_eq!(refused, Err(RadixError::PageInUse(PageId(2))));
    assert!(!tree.contains_page(PageId(3)));
    let other = tree.insert(NamespaceId(8), &tokens(1, 20), &pages(1, 2));
    assert_eq!(other, Err(RadixError::PageInUse(PageId(1))));
    assert_eq!((tree.num_pages(), tree.num_namespaces()), (2, 1));
    let same = tree.insert(NAMESPACE, &tokens(1, 20), &pages(1, 2)).unwrap();
    assert_eq!(same.outcomes, [PageOutcome::Present; 2]);
    tree.check_integrity().expect("integrity");
}

#[test]
fn namespaces_do_not_share_and_leave_nothing_behind() {
    let mut tree = RadixTree::new(PAGE_SIZE);
    let prompt = tokens(1, 32);
    for namespace in 0..1_000 {
        assert_eq!(tree.match_prefix(NamespaceId(namespace), &prompt).node, NodeId::ROOT);
    }
    assert_eq!((tree.num_namespaces(), tree.num_nodes()), (0, 0));
    tree.insert(NamespaceId(0), &prompt, &pages(1, 2)).unwrap();
    tree.insert(NamespaceId(1), &prompt, &pages(3, 2)).unwrap();
    assert_eq!(tree.match_prefix(NamespaceId(0), &prompt).pages, pages(1, 2));
    assert_eq!(tree.match_prefix(NamespaceId(1), &prompt).pages, pages(3, 2));
    assert_eq!(tree.match_prefix(NamespaceId(2), &prompt).num_tokens, 0);
    assert_eq!(evict(&mut tree, 2), [PageId(2), PageId(1)]);
    assert_eq!((tree.num_namespaces(), tree.num_nodes()), (1, 2));
}

#[test]
fn the_root_can_be_locked_and_means_nothing() {
    let mut tree = RadixTree::new(1);
    tree.lock(NodeId::ROOT).unwrap();
    tree.insert(NAMESPACE, &[1], &pages(1, 1)).unwrap();
    assert_eq!(evict(&mut tree, 1), pages(1, 1));
    tree.unlock(NodeId::ROOT).unwrap();
}

#[test]
fn the_least_recently_used_goes_first_page_by_page() {
    let mut tree = RadixTree::new(PAGE_SIZE);
    let page_size = PAGE_SIZE as u32;
    tree.insert(NAMESPACE, &tokens(1, 3 * page_size), &pages(1, 3)).unwrap();
    tree.insert(NAMESPACE, &tokens(2, 3 * page_size), &pages(4, 3)).unwrap();
    tree.match_prefix(NAMESPACE, &tokens(1, page_size + 4));
    // Of stream 1, the first page and the donor were used last; its third page is the oldest of
    // all.
    assert_eq!(evict(&mut tree, 2), [PageId(3), PageId(6)]);
    assert_eq!(evict(&mut tree, 9), [5, 4, 2, 1].map(PageId));
}

/// Counts the measured matches that must be measured again, and does so.
fn refresh_all(tree: &RadixTree, keys: &[Vec<u32>], peeks: &mut [radix_tree::Peek]) -> usize {
    keys.iter().zip(peeks).map(|(key, peek)| usize::from(tree.refresh(NAMESPACE, key, peek))).sum()
}

#[test]
fn changes_elsewhere_do_not_disturb_waiting_matches() {
    const WAITING: u32 = 1_000;
    const INSERTS: u32 = 200;
    let mut tree = RadixTree::new(PAGE_SIZE);
    // All share a system prompt of 5 pages, then differ.
    let system = tokens(0, 5 * PAGE_SIZE as u32);
    let prompt = |stream: u32| {
        let scattered = stream.wrapping_mul(2_654_435_761) % 1_000;
        [&system[..], &tokens(scattered + 1, 3 * PAGE_SIZE as u32)].concat()
    };
    tree.insert(NAMESPACE, &system, &pages(1, 5)).unwrap();
    let keys: Vec<Vec<u32>> = (0..WAITING).map(prompt).collect();
    let mut peeks: Vec<_> = keys.iter().map(|key| tree.peek(NAMESPACE, key)).collect();
    let mut num_measured = 0;
    for stream in 0..INSERTS {
        let key = prompt(stream + WAITING / 2);
        // As in serving: match, then insert in chunks of two pages, lock, go on.
        let mut node = tree.match_prefix(NAMESPACE, &key).node;
        let mut done = 5;
        for chunk in key[5 * PAGE_SIZE..].chunks(2 * PAGE_SIZE) {
            let count = (chunk.len() / PAGE_SIZE) as u32;
            let fresh = pages(100 + 10 * stream + done, count);
            node = tree.insert_below(NAMESPACE, node, chunk, &fresh).unwrap().node;
            done += count;
            num_measured += refresh_all(&tree, &keys, &mut peeks);
        }
        for (key, peek) in keys.iter().zip(&peeks) {
            assert_eq!(tree.peek(NAMESPACE, key).num_tokens, peek.num_tokens);
        }
    }
    // The first insert concerns everybody; then each concerns those whose sorted neighbour it
    // became.
    let harmonic: f64 = (1..=INSERTS).map(|count| 1.0 / f64::from(count)).sum();
    let bound = 3.0 * f64::from(WAITING) * harmonic;
    assert!((num_measured as f64) < bound, "{num_measured} measured, bound {bound}");
}

#[test]
fn a_chain_of_many_nodes_needs_no_stack() {
    const PAGES: u32 = 100_000;
    let mut tree = RadixTree::new(1);
    let mut node = NodeId::ROOT;
    for page in 0..PAGES {
        node = tree.insert_below(NAMESPACE, node, &[page % 3], &[PageId(page)]).unwrap().node;
    }
    tree.lock(node).unwrap();
    assert_eq!(tree.num_evictable_pages(), 0);
    tree.unlock(node).unwrap();
    let key: Vec<u32> = (0..PAGES).map(|page| page % 3).collect();
    assert_eq!(tree.match_prefix(NAMESPACE, &key).pages.len(), PAGES as usize);
    tree.check_integrity().expect("integrity");
    assert_eq!(tree.clear().unwrap().len(), PAGES as usize);
}
