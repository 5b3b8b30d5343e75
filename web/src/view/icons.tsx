// Icons, drawn in the colour of the text.

const PATHS = {
  menu: "M4 6h16M4 12h16M4 18h16",
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  sliders: "M4 8h9m5 0h2M4 16h3m5 0h8M15.5 5.5v5M9.5 13.5v5",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  again: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  forward: "M5 5l8 7-8 7zM14 5l6 7-6 7",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  left: "M15 6l-6 6 6 6",
  right: "M9 6l6 6-6 6",
  down: "M6 10l6 6 6-6",
  close: "M6 6l12 12M18 6L6 18",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 2v3m0 14v3M2 12h3m14 0h3M5 5l2 2m10 10l2 2M19 5l-2 2M7 17l-2 2",
  moon: "M20 14A8 8 0 1 1 10 4a7 7 0 0 0 10 10z",
  auto: "M12 3a9 9 0 1 0 0 18 9 9 0 0 0 0-18zM12 3v18M15 5v14M18 8v8",
  code: "M8 7l-5 5 5 5M16 7l5 5-5 5",
  chart: "M5 20V12M10 20V6M15 20v-9M20 20V9",
  check: "M5 13l4 4L19 7",
  more: "M5 12h.01M12 12h.01M19 12h.01",
  key: "M14 10a4 4 0 1 0-4 4l2-1 2 2h2v2h2v2h3v-3l-7-6",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name }: { name: IconName }) {
  return (
    <svg class="icon" viewBox="0 0 24 24" aria-hidden="true">
      <path d={PATHS[name]} />
    </svg>
  );
}

interface IconButtonProps {
  icon: IconName;
  label: string; // its name, also shown as a tooltip
  onClick: () => void;
  pressed?: boolean;
  disabled?: boolean;
  class?: string;
  keys?: string;
}

export function IconButton({
  icon,
  label,
  onClick,
  pressed,
  disabled,
  keys,
  class: name = "",
}: IconButtonProps) {
  return (
    <button
      type="button"
      class={`icon-button ${name}`}
      aria-label={label}
      title={keys ? `${label} (${keys})` : label}
      aria-pressed={pressed}
      disabled={disabled}
      onClick={onClick}
    >
      <Icon name={icon} />
    </button>
  );
}
