// Scrolling with an answer that is being written, until the reader scrolls up.

import type { RefObject } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

const AWAY_PX = 60;
const RELEASED_MS = 200; // in which a scroll of our own may still be reported
const KEYS_UP = ["ArrowUp", "PageUp", "Home"];

interface Following {
  isAway: boolean; // the end is out of sight
  follows: RefObject<boolean>;
  toEnd: () => void;
  handlers: {
    onScroll: () => void;
    onWheel: (event: WheelEvent) => void;
    onTouchMove: () => void;
    onTouchEnd: () => void;
    onKeyDown: (event: KeyboardEvent) => void;
  };
}

export function useFollowing(
  scroller: RefObject<HTMLElement | null>,
  content: RefObject<HTMLElement | null>,
): Following {
  const follows = useRef<boolean>(true);
  const lastTop = useRef(0);
  const releasedMs = useRef(Number.NEGATIVE_INFINITY);
  const [isAway, setIsAway] = useState(false);

  const distance = () => {
    const box = scroller.current;
    return box ? box.scrollHeight - box.scrollTop - box.clientHeight : 0;
  };
  // The end comes into sight without a scroll when the content becomes shorter, or the window larger.
  useEffect(() => {
    const observer = new ResizeObserver(() => setIsAway(distance() > AWAY_PX));
    for (const { current } of [scroller, content]) current && observer.observe(current);
    return () => observer.disconnect();
  }, [content.current]);
  // At once: a scroll is reported only after the next text may have scrolled back.
  const release = () => {
    follows.current = false;
    releasedMs.current = performance.now();
  };
  const toEnd = () => {
    follows.current = true;
    if (scroller.current) scroller.current.scrollTop = scroller.current.scrollHeight;
  };
  const onScroll = () => {
    const top = scroller.current?.scrollTop ?? 0;
    const isReleased = performance.now() - releasedMs.current < RELEASED_MS;
    if (distance() <= 2 && !isReleased) follows.current = true;
    else if (top < lastTop.current) follows.current = false;
    lastTop.current = top;
    setIsAway(distance() > AWAY_PX);
  };
  const handlers = {
    onScroll,
    onWheel: (event: WheelEvent) => {
      if (event.deltaY < 0) release();
    },
    onTouchMove: release,
    onTouchEnd: () => {
      if (distance() <= 2) follows.current = true;
    },
    onKeyDown: (event: KeyboardEvent) => {
      if (KEYS_UP.includes(event.key)) release();
    },
  };
  return { isAway, follows, toEnd, handlers };
}
