//! The prefix tree: token sequences to KV pages.
//!
//! A [`RadixTree`] remembers which page of the KV pool holds which tokens, so that a new sequence
//! can reuse the computation of every earlier one with which it shares a prefix. It matches token
//! by token although pages hold `page_size` of them, protects what is in use ([`RadixTree::lock`]),
//! and gives back the least recently used pages ([`RadixTree::evict`]).
//!
//! It does not know the pool, requests, devices, time or threads: pages are numbers that the caller
//! hands in and gets back, and every page is owned either by the tree or by the caller. It is
//! deterministic.
//!
//! ```
//! use radix_tree::{NamespaceId, PageId, RadixTree};
//!
//! let mut tree = RadixTree::new(4);
//! let namespace = NamespaceId(0);
//! let inserted = tree.insert(namespace, &[1, 2, 3, 4, 5, 6, 7, 8], &[PageId(10), PageId(11)])?;
//! tree.lock(inserted.node)?;
//!
//! // One whole page is shared; of the next, the first two tokens can be copied.
//! let matched = tree.match_prefix(namespace, &[1, 2, 3, 4, 5, 6, 0, 0, 0]);
//! assert_eq!(matched.pages, [PageId(10)]);
//! let donor = matched.donor.expect("the match ends inside a page");
//! assert_eq!((donor.page, donor.num_tokens), (PageId(11), 2));
//!
//! let mut freed = Vec::new();
//! assert_eq!(tree.evict(1, &mut freed), 0); // locked
//! tree.unlock(inserted.node)?;
//! assert_eq!(tree.evict(1, &mut freed), 1);
//! assert_eq!(freed, [PageId(11)]);
//! # Ok::<(), radix_tree::RadixError>(())
//! ```
//!
//! A queue ordered by cached prefix measures each waiting key once ([`RadixTree::peek`]) and then
//! asks for changes only ([`RadixTree::refresh`]): constant time per key as long as nothing has
//! entered or left the tree where that key leaves it.
//!
//! ```
//! # use radix_tree::{NamespaceId, PageId, RadixTree};
//! # let mut tree = RadixTree::new(2);
//! # let namespace = NamespaceId(0);
//! let mut peek = tree.peek(namespace, &[1, 2, 3, 4]);
//! assert_eq!(peek.num_tokens, 0);
//! tree.insert(namespace, &[1, 2, 3], &[PageId(1), PageId(2)])?;
//! assert!(tree.refresh(namespace, &[1, 2, 3, 4], &mut peek));
//! assert_eq!(peek.num_tokens, 3);
//! tree.insert(namespace, &[7, 7], &[PageId(3)])?;
//! assert!(tree.is_current(peek.watch));
//! # Ok::<(), radix_tree::RadixError>(())
//! ```

mod arena;
mod error;
mod evict;
mod insert;
mod integrity;
mod lock;
mod page_set;
mod tokens;
mod tree;
mod types;

pub use error::RadixError;
pub use integrity::IntegrityError;
pub use tree::RadixTree;
pub use types::{Donor, Inserted, Match, NamespaceId, NodeId, PageId, PageOutcome, Peek, Watch};
