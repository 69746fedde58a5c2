export function AuditPage() {
  return <div class="head"><h1>Audit</h1></div>;
}
