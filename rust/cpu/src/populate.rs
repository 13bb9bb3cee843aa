//! Physical memory for a KV pool, taken before its pages are written.
//!
//! What the kernel has ready costs a step 0.1 ms per huge page, what the host of a virtual machine
//! must supply first 5 ms; and a page's first token touches one in every layer. It is taken in the
//! order in which fresh pages are handed out: ascending, in all layers side by side.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::memory::{HUGE_PAGE_BYTES, Mapping, Region};

/// What steps do with a pool.
#[derive(Default)]
pub(crate) struct PoolUsage {
    /// All pages that were written lie below this one.
    pages: AtomicUsize,
    is_running: AtomicBool,
    last_end: Mutex<Option<Instant>>,
}

impl PoolUsage {
    /// A step that writes these pages begins.
    pub(crate) fn begin(&self, pages: &[u32]) {
        let end = pages.iter().max().map_or(0, |&page| page as usize + 1);
        self.pages.fetch_max(end, Ordering::Relaxed);
        self.is_running.store(true, Ordering::Relaxed);
    }

    /// A step ends.
    pub(crate) fn end(&self) {
        *self.last_end.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.is_running.store(false, Ordering::Relaxed);
    }
}

/// The memory of one pool, as far as it is not taken yet. Does not keep the pool alive.
pub struct Population {
    mapping: Weak<Mapping>,
    bytes: Range<usize>,
    num_layers: usize,
    page_bytes: usize,
    usage: Arc<PoolUsage>,
    next: usize,
}

impl Population {
    /// A pool of pages that take `page_bytes` in all layers.
    pub(crate) fn new(
        words: &Region,
        num_layers: usize,
        page_bytes: usize,
        usage: Arc<PoolUsage>,
    ) -> Population {
        let (mapping, bytes) = words.place();
        Population { mapping, bytes, num_layers, page_bytes, usage, next: 0 }
    }

    /// Take about so many bytes more, and wait for that: in a thread that gets only the time that
    /// nobody else wants. False if nothing is left to take: all is there, or the pool is gone.
    ///
    /// # Errors
    /// The system refuses memory or the thread, or cannot do it.
    ///
    /// # Panics
    /// If the thread does.
    pub fn advance(&mut self, num_bytes: usize) -> io::Result<bool> {
        std::thread::scope(|scope| {
            let work = || {
                yield_to_everybody();
                self.take(num_bytes.div_ceil(HUGE_PAGE_BYTES))
            };
            let thread = std::thread::Builder::new().name("kv-pool".into());
            thread.spawn_scoped(scope, work)?.join().expect("taking memory panicked")
        })
    }

    /// Bytes that are taken beyond all pages that were written.
    pub fn bytes_ahead(&self) -> usize {
        let taken = (self.next * HUGE_PAGE_BYTES).min(self.num_bytes());
        taken.saturating_sub(self.usage.pages.load(Ordering::Relaxed) * self.page_bytes)
    }

    /// Time since the last step, 0 while one runs; `None` before the first.
    pub fn idle_time(&self) -> Option<Duration> {
        if self.usage.is_running.load(Ordering::Relaxed) {
            return Some(Duration::ZERO);
        }
        let last_end = self.usage.last_end.lock().unwrap_or_else(PoisonError::into_inner);
        last_end.map(|at| at.elapsed())
    }

    /// Bytes of the pool.
    pub fn num_bytes(&self) -> usize {
        self.bytes.len()
    }

    fn take(&mut self, num_pieces: usize) -> io::Result<bool> {
        for _ in 0..num_pieces {
            // Held for one piece: a pool that is dropped is unmapped after it.
            let Some(mapping) = self.mapping.upgrade() else { return Ok(false) };
            let Some(piece) = self.piece() else { return Ok(false) };
            mapping.populate(piece)?;
            self.next += 1;
        }
        Ok(true)
    }

    /// The next piece of the mapping: a huge page, or what the pool has of the last one.
    fn piece(&mut self) -> Option<Range<usize>> {
        let layer_bytes = self.bytes.len() / self.num_layers;
        // A layer may begin and end within a huge page.
        let rounds = layer_bytes.div_ceil(HUGE_PAGE_BYTES) + 1;
        while self.next < rounds * self.num_layers {
            let (round, layer) = (self.next / self.num_layers, self.next % self.num_layers);
            let layer_start = self.bytes.start + layer * layer_bytes;
            let start = (layer_start / HUGE_PAGE_BYTES + round) * HUGE_PAGE_BYTES;
            let end = (layer_start + layer_bytes).min(start + HUGE_PAGE_BYTES);
            if start < end {
                return Some(start..end);
            }
            self.next += 1;
        }
        None
    }
}

/// Give this thread the lowest priority. Where that is refused it merely competes with others.
fn yield_to_everybody() {
    #[cfg(target_os = "linux")]
    // SAFETY: both calls change how the calling thread is scheduled, and nothing else.
    unsafe {
        let parameter: libc::sched_param = std::mem::zeroed();
        libc::setpriority(libc::PRIO_PROCESS, 0, 19);
        libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameter);
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    const SMALL_PAGE_BYTES: usize = 4096;

    fn population(region: &Region, num_layers: usize) -> Population {
        Population::new(region, num_layers, num_layers * SMALL_PAGE_BYTES, Arc::default())
    }

    /// How many of the words' small pages, counted from their start, are in memory without a gap.
    fn resident_bytes(region: &Region, first: usize, bytes: usize) -> usize {
        let start = region.as_ptr() as usize + first;
        let aligned = start / SMALL_PAGE_BYTES * SMALL_PAGE_BYTES;
        let mut states = vec![0_u8; (start + bytes - aligned).div_ceil(SMALL_PAGE_BYTES)];
        // SAFETY: the pages are the region's; only `states` is written.
        let outcome = unsafe {
            let pages = std::ptr::with_exposed_provenance_mut(aligned);
            libc::mincore(pages, states.len() * SMALL_PAGE_BYTES, states.as_mut_ptr())
        };
        assert_eq!(outcome, 0);
        let resident = states.iter().take_while(|&&state| state & 1 == 1).count();
        (resident * SMALL_PAGE_BYTES).saturating_sub(start - aligned).min(bytes)
    }

    #[test]
    fn everything_is_taken_and_nothing_changes() {
        for (num_layers, layer_words) in [(1, 5), (3, 1000), (2, 1 << 20), (5, 700_001)] {
            let mut region = Region::new(num_layers * layer_words);
            let last = region.len() - 1;
            region.as_mut_slice()[last] = 7;
            let mut population = population(&region, num_layers);
            while population.advance(3 * HUGE_PAGE_BYTES).unwrap() {}
            assert_eq!(resident_bytes(&region, 0, 4 * region.len()), 4 * region.len());
            assert!(region.as_slice()[..last].iter().all(|&word| word == 0));
            assert_eq!(region.as_slice()[last], 7);
            assert!(!population.advance(1).unwrap());
        }
    }

    #[test]
    fn all_layers_have_their_first_pages_before_one_has_its_last() {
        let (num_layers, layer_bytes) = (4, 11 * HUGE_PAGE_BYTES / 2);
        let region = Region::new(num_layers * layer_bytes / 4);
        let mut population = population(&region, num_layers);
        for round in 0..5 {
            population.advance(num_layers * HUGE_PAGE_BYTES).unwrap();
            for layer in 0..num_layers {
                let resident = resident_bytes(&region, layer * layer_bytes, layer_bytes);
                let least = (round * HUGE_PAGE_BYTES + 1).min(layer_bytes);
                assert!(resident >= least, "layer {layer}, round {round}: {resident}");
            }
        }
    }

    #[test]
    fn what_is_written_meanwhile_stays() {
        let mut region = Region::new(24 * HUGE_PAGE_BYTES / 4);
        let mut population = population(&region, 3);
        let taking = std::thread::spawn(move || while population.advance(1).unwrap() {});
        for (index, word) in region.as_mut_slice().iter_mut().enumerate() {
            *word = index as u32;
        }
        taking.join().unwrap();
        assert!(region.as_slice().iter().enumerate().all(|(index, &word)| word == index as u32));
    }

    #[test]
    fn a_pool_that_is_gone_has_nothing_to_take() {
        let region = Region::new(4 * HUGE_PAGE_BYTES / 4);
        let mut population = population(&region, 1);
        assert!(population.advance(1).unwrap());
        drop(region);
        assert!(!population.advance(usize::MAX).unwrap());
    }

    #[test]
    fn a_refusal_is_reported() {
        let region = Region::new(HUGE_PAGE_BYTES / 4);
        let mut population = population(&region, 1);
        // Beyond the region lies a page that nobody may touch.
        population.bytes.end += SMALL_PAGE_BYTES;
        assert!(population.advance(4 * HUGE_PAGE_BYTES).is_err());
    }

    #[test]
    fn it_knows_what_steps_have_written_and_when() {
        let (num_layers, layer_bytes) = (2, 8 * HUGE_PAGE_BYTES);
        let region = Region::new(num_layers * layer_bytes / 4);
        let mut population = population(&region, num_layers);
        assert_eq!((population.bytes_ahead(), population.idle_time()), (0, None));
        population.advance(6 * HUGE_PAGE_BYTES).unwrap();
        assert_eq!(population.bytes_ahead(), 6 * HUGE_PAGE_BYTES);
        let pages = HUGE_PAGE_BYTES / SMALL_PAGE_BYTES;
        population.usage.begin(&[3, pages as u32 - 1, 7]);
        population.usage.begin(&[2]);
        assert_eq!(population.bytes_ahead(), 4 * HUGE_PAGE_BYTES, "a huge page in each layer");
        assert_eq!(population.idle_time(), Some(Duration::ZERO), "the step has not ended");
        population.usage.end();
        assert_ne!(population.idle_time(), Some(Duration::ZERO));
        population.usage.begin(&[8 * pages as u32 - 1]);
        assert_eq!(population.bytes_ahead(), 0);
        while population.advance(1).unwrap() {}
        assert_eq!(population.bytes_ahead(), 0);
    }
}
